"""Compare the hidden states that a model computes for texts: a scatter, and their covariance.

    python research/papers/features.py --models=google/gemma-2-2b,out/tuned --part=prompt

features.md says what a feature is, what is measured, and why. The script writes a features.md
with the table, features.csv, and figure6.png, the scatter.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from data.eval_config import training_settings
from data.files import parsed, read_rows, require_fields, require_text
from data.instruct import PATTERNS, first_turns
from data.messages import to_messages
from data.tree_rows import Tree
from data.tokenizer import begins_with_bos, load_model_tokenizer
from research.common import write_csv
from results import figures, plots
from results.tables import aligned, markdown
from runtime import checkpoint, cli
from runtime.config import load_config, require_range
from runtime.device import pick_device, pick_dtype
from runtime.errors import ConfigError, DataError
from runtime.sources import fetch
from runtime.ownership import claim, lock, write_text
from scoring import score, token_states


@dataclass
class FeatureConfig:
    models: tuple[str, ...] = ('huggyllama/llama-7b',)      # folders or hub names
    data: tuple[str, ...] = ('tatsu-lab/alpaca', 'OpenAssistant/oasst1')    # as `data` of train.py
    # the last answer, the first prompt, or the field `text` of a row
    part: Literal['answer', 'prompt', 'text'] = 'answer'
    pooling: Literal['mean', 'last'] = 'mean'   # over the tokens of a text but BOS, or the last one
    n: int | None = None                      # texts per dataset, cut to the smallest; None: 2 D
    max_length: int = 512                     # tokens; longer texts are cut
    batch_tokens: int = 16384                 # tokens of a forward pass
    seed: int = 0                             # draws the texts
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU
    device: str = 'auto'
    out_dir: str = 'out/papers/features'


PARTS = {'answer': lambda row: to_messages(row)[-1]['content'],
         'prompt': lambda row: [m['content'] for m in to_messages(row) if m['role'] == 'user'][0],
         'text': lambda row: require_fields(row)['text']}


def read_texts(source, part):
    """Return the texts of a dataset; rows without one are left out and counted."""
    rows = (row for file in fetch(source, PATTERNS) for row in read_rows(file))
    texts = [parsed(place, row, lambda row: require_text(PARTS[part](row), part))
             for place, row in first_turns(rows, 'all')]
    bad = [text for text in texts if isinstance(text, DataError)]
    texts = [text for text in texts if not isinstance(text, DataError) and text.strip()]
    if not texts:
        raise DataError(f'{source} has no {part}{f", the first row: {bad[0]}" if bad else ""}')
    print(f'{source}: {len(texts):,} texts',
          *[f'({len(bad)} bad rows left out, the first: {error})' for error in bad[:1]])
    return texts


def features(model, tokenizer, texts, cfg, add_bos):
    """Return the features of texts, float32 [n, D]."""
    bos, trees = [tokenizer.bos_id] * add_bos, []
    for text in texts:
        ids = (bos + tokenizer.encode(text))[:cfg.max_length]
        if len(ids) <= len(bos):
            raise DataError(f'a text has no tokens: {text!r}')
        first = len(bos) if cfg.pooling == 'mean' else len(ids) - 1
        # the state of a token is what predicts the next one; after the last token any will do
        trees.append(Tree((), [*ids, 0], scored=[*range(first + 1, len(ids) + 1)]))
    states = np.empty((len(texts), model.config.hidden_size), np.float32)
    for i, _, values in score(lambda: model, enumerate(trees), compute=token_states,
                              pack_len=max(cfg.batch_tokens, cfg.max_length + 1),
                              trim=128 if model.head.is_cuda else 1):
        states[i] = values.mean(0)
    return states


def measures(x):
    """Return the cells of a line for features x [n, D]; for n <= D two are empty."""
    x, n = x.astype(np.float64), len(x)
    centered = x - x.mean(0)
    values = np.linalg.eigvalsh(centered.T @ centered / (n - 1)).clip(0)
    share = values[values > 0] / values.sum()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosine = ((unit.sum(0) ** 2).sum() - n) / (n * (n - 1))
    least = ['', ''] if n <= len(values) else [
        f'{value:.3g}' for value in (values[0], values[0] / values.mean())]
    return f'{n}', *least, f'{np.exp(-(share * np.log(share)).sum()):.1f}', f'{cosine:.3f}'


def draw_scatter(path, panels):
    """Draw panels = {model: {dataset: features [n, D]}}, texts by two principal components."""
    with plots.warn_on_failure(path):
        figure = plots.new_figure(5 * len(panels), 5)
        for ax, (model, groups) in zip(figure.subplots(1, len(panels), squeeze=False).flat,
                                       panels.items(), strict=True):
            x = np.concatenate([*groups.values()]).astype(np.float64)
            center = x.mean(0)
            values, vectors = np.linalg.eigh((x - center).T @ (x - center))
            for name, group in groups.items():
                points = (group.astype(np.float64) - center) @ vectors[:, :-3:-1]
                ax.scatter(*points.T, s=4, alpha=0.4, linewidth=0, label=figures.printable(name))
            first, second = values[:-3:-1] / values.sum()
            ax.set(xlabel=f'component 1, {first:.0%} of the variance', xticks=[], yticks=[],
                   ylabel=f'component 2, {second:.0%}', title=plots.figure_title(model, 50))
            for handle in ax.legend(fontsize=8, markerscale=3).legend_handles:
                handle.set_alpha(1)
        plots.save_figure(figure, path, 150)


def run(cfg):
    """Write the table and the figure; return the lines of the table."""
    require_range(cfg, 2, float('inf'), 'n', 'max_length')
    require_range(cfg, 1, float('inf'), 'batch_tokens')
    texts = {Path(source).name: read_texts(source, cfg.part) for source in cfg.data}
    if len(texts) < len(cfg.data):
        raise ConfigError(f'data: two of {", ".join(cfg.data)} have the same name')
    lines = [('model', 'texts of', 'n', 'smallest singular value', 'relative to the mean one',
              'effective rank', 'mean cosine')]
    panels, device = {}, pick_device(cfg.device)
    for name in cfg.models:
        folder = checkpoint.fetch(name)
        tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
        model = checkpoint.load(folder, device, pick_dtype(cfg.dtype, device)).eval()
        add_bos = begins_with_bos(tokenizer, training_settings(folder).get('add_bos'))
        size = min(cfg.n or 2 * model.config.hidden_size, *map(len, texts.values()))
        panels[name] = {}
        for source, rows in texts.items():
            drawn = np.random.default_rng(cfg.seed).permutation(len(rows))[:size]
            x = features(model, tokenizer, [rows[i] for i in drawn], cfg, add_bos)
            if not np.isfinite(x).all():
                raise ConfigError(f'{name}: the hidden states overflow; set --dtype=float32')
            panels[name][source] = x
            if len(x) <= x.shape[1]:
                print(f'{source}: {len(x):,} texts are too few for the smallest singular value of '
                      f'{x.shape[1]:,} features; it is left out')
            lines.append((name, source, *measures(x)))
        del model
    table, about = markdown(lines), Path(__file__).with_suffix('.md').read_text()
    with lock(cfg.out_dir):
        claim(cfg.out_dir, 'features.md', 'features.csv', 'figure6.png')
        write_text(Path(cfg.out_dir, 'features.md'), f'{table}\n{about}')
        write_csv(Path(cfg.out_dir, 'features.csv'), lines)
        draw_scatter(Path(cfg.out_dir, 'figure6.png'), panels)
    print(f'{aligned(lines)}\nwrote features.md, features.csv and figure6.png to {cfg.out_dir}')
    return lines


if __name__ == '__main__':
    with cli.one_line_errors():
        run(load_config(FeatureConfig, sys.argv[1:], __doc__))
