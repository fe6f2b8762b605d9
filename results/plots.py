"""Pictures: reliability diagrams. A failure is only a warning."""

import numpy as np

import metrics
from results.figures import figure_title, new_figure, save_figure, warn_on_failure

FEWEST = 10     # a reliability curve leaves out bins with fewer questions


def draw_reliability(path, panels, columns=5):
    """Draw [(title, Predictions), ...] as `draw_bins` does; return whether it succeeded."""
    measured = {'accuracy': metrics.accuracy, 'confidence': metrics.mean_confidence,
                'ECE': metrics.ece}
    with warn_on_failure(path) as written:
        draw_bins(path, [(title, {name: metric(*p[:2]) for name, metric in measured.items()},
                          p.bins()) for title, p in panels], columns)
    return bool(written)


def draw_bins(path, panels, columns=5):
    """Draw reliability diagrams of [(title, {name: number}, metrics.bins), ...] as a PNG.

    Bars: the accuracy in each bin of confidence, its 95 % Wilson interval, and the gap to the mean
    confidence. Below: the share of questions in each bin.
    """
    columns = min(columns, len(panels))
    figure, axes = pairs_of_axes(len(panels), columns, max(3.6 * columns, 4.5), (4.6, 0.5),
                                 sharex=True, sharey='row')
    highest = max(float(bins['count'].max() / bins['count'].sum()) for _, _, bins in panels)
    for i, ((top, bottom), panel) in enumerate(zip(axes, panels, strict=True)):
        _draw_panel(top, bottom, *panel)
        bottom.set_ylim(0, 1.05 * highest)
        if i % columns == 0:
            top.set_ylabel('accuracy')
            bottom.set_ylabel('share')
        if i + columns >= len(panels):
            bottom.set_xlabel('confidence')
            bottom.tick_params(labelbottom=True)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc='outside lower center', fontsize=8,
                  frameon=False, ncols=1 if columns == 1 else 2 if columns < 4 else 5)
    save_figure(figure, path, 150 if len(panels) == columns else 80)


def pairs_of_axes(n, columns, width, height, **shared):
    """Return (a figure of `n` panels, the axes of each: a diagram, below it the shares); height:
    (of a row, what is added), in inches like the width.
    """
    rows = -(-n // columns)
    figure = new_figure(width, height[0] * rows + height[1])
    axes = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=(3, 1) * rows, **shared)
    for ax in axes[-2:, n - columns * (rows - 1):].flat:
        ax.axis('off')
    return figure, [axes[i // columns * 2:, i % columns][:2] for i in range(n)]


def _draw_panel(top, bottom, title, numbers, bins):
    """Draw a reliability diagram on the axes `top`, and the shares of its bins on `bottom`."""
    used, n = bins['count'] > 0, bins['count'].sum()
    width = 1 / len(bins['count'])
    left = np.flatnonzero(used) * width
    accuracy, confidence, low, high = (bins[key][used] for key in (
        'accuracy', 'confidence', 'low', 'high'))
    bar = {'width': width, 'align': 'edge'}
    top.bar(left, accuracy, color='#4878a8', edgecolor='white', label='accuracy of the bin', **bar)
    # bars of height 0 too, so that every picture has both colors in its legend; a gap within the
    # accuracy's bar leaves that visible
    top.bar(left, np.maximum(confidence - accuracy, 0), bottom=accuracy, color='#e8a29e',
            label='overconfident: confidence above accuracy', **bar)
    top.bar(left, np.maximum(accuracy - confidence, 0), bottom=confidence, facecolor='none',
            edgecolor='#f5c566', hatch='////', linewidth=0,
            label='underconfident: confidence below accuracy', **bar)
    ends = np.maximum((accuracy - low, high - accuracy), 0)     # -1e-16 by rounding
    top.errorbar(left + width / 2, accuracy, ends, fmt='none', color='black', linewidth=1,
                 capsize=2, label='95 % Wilson interval of the accuracy')
    top.plot((0, 1), (0, 1), '--', color='black', linewidth=1, label='perfect calibration')
    top.set_title(f'{figure_title(title, 36)}\naccuracy {numbers["accuracy"]:.3f}, '
                  f'confidence {numbers["confidence"]:.3f}\nECE {numbers["ECE"]:.3f}, n = {n:,}',
                  fontsize=9)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.bar(left, bins['count'][used] / n, color='#888888', edgecolor='white', **bar)


def draw_curves(path, panels, columns=3):
    """Draw the reliability curves of {title: {run: metrics.bins}}, a panel per title, as a PNG.

    A curve joins the bins of FEWEST questions or more; its band is the 95 % Wilson interval of the
    accuracy. Below: the share of questions in each bin. Return whether it succeeded.
    """
    with warn_on_failure(path) as written:
        from matplotlib import colormaps
        columns = min(columns, len(panels))
        figure, axes = pairs_of_axes(len(panels), columns, 4.6 * columns, (5.8, 0))
        for (top, bottom), (title, runs) in zip(axes, panels.items(), strict=True):
            top.plot((0, 1), (0, 1), '--', color='black', linewidth=1)
            n = len(runs)       # up to ten distinct colors, or a scale from dark to bright
            colors = (colormaps['tab10'](range(n)) if n <= 10 else
                      colormaps['viridis'](np.linspace(0, 0.95, n)))
            for color, (run, bins) in zip(colors, runs.items(), strict=True):
                _draw_curve(top, bottom, run, bins, color)
            top.set(title=figure_title(title, 44), xlim=(0, 1), ylim=(0, 1), ylabel='accuracy')
            top.legend(fontsize=7, loc='upper left', title_fontsize=7, alignment='left',
                       title=f'ECE  (bins of ≥ {FEWEST})')
            bottom.set(xlim=(0, 1), ylim=(0, None), xlabel='confidence', ylabel='share')
        save_figure(figure, path, 150)
    return bool(written)


def _draw_curve(top, bottom, run, bins, color):
    """Draw one run's reliability curve on the axes `top`, and its shares on `bottom`."""
    count, confidence, accuracy, low, high = (np.array(bins[key], float) for key in (
        'count', 'confidence', 'accuracy', 'low', 'high'))
    share, used = count / count.sum(), count >= FEWEST
    ece = np.nansum(share * np.abs(accuracy - confidence))
    top.fill_between(confidence[used], low[used], high[used], color=color, alpha=0.12, linewidth=0)
    top.plot(confidence[used], accuracy[used], color=color, linewidth=1.3,
             label=f'{ece:.3f}  {figure_title(run, 30)}')
    top.scatter(confidence[used], accuracy[used], 4 + 60 * share[used], color=color, linewidth=0)
    bottom.stairs(share, np.linspace(0, 1, len(share) + 1), color=color, linewidth=1.3)
