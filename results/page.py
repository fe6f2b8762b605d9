"""Samples to read: report.html and compare.html.

page.html is the template: plain HTML and a script without libraries. The page is one file that
needs no network. Its script keeps 50 samples in the document at a time.
"""

import base64
import html
import itertools
import json
import re
import time
from collections import Counter
from pathlib import Path

import metrics
from results.report import predictions, section
from results.samples import grid, of_split, sample_order
from runtime import rooms
from runtime.config import run_folder, run_settings
from runtime.ownership import write_text

TEMPLATE = Path(__file__).with_name('page.html')
MOST = 30_000       # samples in a page; a browser opens MMLU's 14,042 in less than a second
WRITTEN = 'greedy', 'answers'       # keys of a sample of written answers


# Samples


def to_read(results, samples):
    """Return {task: its `task_rows`, mistakes first}."""
    rows = {}
    for task, result in results.items():
        # a confidence in written answers, such as `gsm8k.agreement`, has them in its task
        written = {sample_order(s)[1:]: {key: s[key] for key in WRITTEN if key in s}
                   for s in samples.get(task.partition('.')[0], ())}
        test = [written.get(sample_order(s)[1:], {}) | s
                for s in sorted(of_split(samples[task]), key=sample_order)]
        rows[task] = sorted(task_rows(test, result['norm']), key=mistakes_first)
    return rows


def task_rows(samples, norm):
    """Return the samples of one task as rows of the page.

    With options, they are [[text, probability]], 'answer' the right index and 'chosen' the top one;
    else there are the texts 'predicted' and 'expected', and perhaps 'written' and 'samples'.
    """
    predicted = predictions(samples, norm)
    confidence, correct = metrics.top_label(predicted.probs, predicted.labels)
    rows = [{'task': s['task'], 'language': s.get('language'), 'subject': s.get('subject'),
             'id': s['id'], 'text': s.get('context', ''), 'confidence': round(c, 4), 'correct': ok}
            for s, c, ok in zip(samples, confidence.tolist(), correct.tolist(), strict=True)]
    if predicted.is_graded:
        rows = [row | {'confidence': None} for row in rows]
    if 'log_probs' in samples[0]:
        for row, s, probs, k in zip(rows, samples, predicted.probs.round(4).tolist(),
                                    metrics.predicted(predicted.probs).tolist(), strict=True):
            # probs has zeros for further options of other questions
            options = [*zip(s.get('choices', s['options']), probs, strict=False)]
            row |= {'options': options, 'answer': s['answer'], 'chosen': k}
        return rows
    for row, s in zip(rows, samples, strict=True):
        row |= {key: s[key] for key in ('predicted', 'expected') if key in s}
        if 'greedy' in s:
            row['written'] = s['greedy']['text']
        if 'answers' in s:
            row['predicted'] = row.get('predicted') or 'none'   # nothing could be extracted
            counts = Counter(answer['answer'] or 'none' for answer in s['answers'])
            row['samples'] = ', '.join(f'{n} × {text}' for text, n in counts.most_common())
    return rows


def mistakes_first(row):
    return row['correct'], -(row['confidence'] or 0)


def select(rows, most=MOST):
    """Return (`most` of {task: rows}, equally many per run, task and language; number of all)."""
    groups = {}
    for row in itertools.chain(*rows.values()):
        groups.setdefault((row.get('run'), row['task'], row['language']), []).append(row)
    ranked = [row for rank in itertools.zip_longest(*groups.values()) for row in rank if row]
    return sorted(ranked[:most], key=mistakes_first), len(ranked)


# The page

DIAGRAMS = 'Reliability diagrams'       # heading of the pictures
FIRST = 'accuracy', 'ECE'       # columns that are in view on a narrow screen
MAIN = 'model', 'data', 'loss', 'smoothing', 'base_smoothing', 'lr', 'epochs', 'seed'


def write(path, title, version, about, tables, pictures, selected):
    """Write a page. about, tables: HTML; pictures: {heading: names of PNG files beside it};
    selected: what `select` returns.
    """
    chosen, total = selected
    date = f'{time.strftime("%Y-%m-%d")}, nanoCal {version}'
    texts = {
        'title': html.escape(f'{title} ({date})'), 'heading': html.escape(title),
        'about': f'<p class="about">{html.escape(date)}</p>{about}',
        # what the columns are: as text, since no finger can hover
        'tables': tables, 'names': ''.join(f'<dt>{name}<dd>{text}' for name, text in {
            name: text for text, name in re.findall('<th title="([^"]+)">(.*)', tables)}.items()),
        'left-out': '' if len(chosen) == total else (
            f'The page has {len(chosen):,} of {total:,} samples: of each task and language the '
            f'most confident mistakes first. All are in samples.jsonl. '),
        # a JSON string may hold </script>, which would end the element
        'rows': json.dumps(chosen, ensure_ascii=False, separators=(',', ':')).replace(
            '<', r'\u003c'),
        'pictures': ''.join(images(path.parent, *item) for item in pictures.items())}
    page = TEMPLATE.read_text(encoding='utf-8')
    for name, text in texts.items():
        page = page.replace(f'<!--{name}-->', text)     # no text holds another <!--
    write_text(path, page)


def write_report(results, selected, pictures, out_dir):
    """Write report.html with `pictures`, earlier grids, and the settings and loss of its run."""
    tasks, config = results['tasks'], results['config']
    run = run_settings(run_folder(out_dir))
    grids = [name for name in map(grid, tasks) if Path(out_dir, name).exists()]
    loss = ['loss.png'] if run and Path(out_dir, 'loss.png').exists() else []
    trained = [(key, run.get(key)) for key in MAIN[:2]] + rooms.load('card').shown_settings(
        run) if run else []
    settings = {'training': dict(trained), 'evaluation': config, 'versions': results['versions']}
    main = listed({key: run.get(key) for key in MAIN})
    about = [f'<details><summary>{html.escape(main or "settings")}</summary>', *(
        f'<p class="about">{html.escape(f"{kind}: {listed(values)}")}</p>'
        for kind, values in settings.items() if values), '</details>']
    write(Path(out_dir, 'report.html'), f'{config["model"]}: {", ".join(tasks)}',
          results['versions']['nanocal'], ''.join(about),
          ''.join(section_html(section(task, tasks, 'page'), FIRST) for task in tasks),
          {DIAGRAMS: dict.fromkeys((*pictures, *grids) if pictures else ()), 'Training': loss},
          selected)


def listed(settings):
    """Return settings as text, without those that are off."""
    texts = {key: ', '.join(map(str, x)) if isinstance(x, (list, tuple)) else str(x)
             for key, x in settings.items()}
    return ', '.join(f'{key} {x}' for key, x in texts.items() if x not in ('', 'None', 'False'))


def images(folder, heading, names):
    """Return PNG files of a folder as HTML below a heading; '' for none."""
    shown = [f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,'
             f'{base64.b64encode((folder / name).read_bytes()).decode()}">\n' for name in names]
    return f'<h2>{heading}</h2>\n{"".join(shown)}' if shown else ''


def section_html(part, first=()):
    """Return a Section of tables.py as HTML; a table with a title can be folded, a long one is.
    first: titles of the columns that come first.
    """
    title, settings = re.fullmatch(r'(.*?)(?: \(([^()]*)\))?', part.title, re.S).groups('')
    parts = [f'<h2>{html.escape(title)}</h2>', table_html(part.table, first),
             *(f'<p class="about">{html.escape(line)}</p>'
               for line in (settings, *part.notes) if line)]
    for title, table in part.more:
        state = 'open' if len(table) < 20 else ''
        shown = table_html(table, first)
        parts.append(f'<details {state}><summary>{html.escape(title)}</summary>{shown}</details>'
                     if title else shown)
    return '\n'.join(parts) + '\n'


def table_html(lines, first=()):
    """Return lines of cells, header first, as an HTML table; an interval is below its number."""
    names, *columns = zip(*lines, strict=True)
    columns.sort(key=lambda column: first.index(column[0]) if column[0] in first else len(first))
    head, *body = zip(names, *columns, strict=True)
    def cell(text):
        return re.sub(r'^(-?[\d.]+) (\[.*\])$', r'\1<small>\2</small>',
                      html.escape(text)).replace(' *', '&nbsp;*')
    cells = [''.join(f'<th title="{html.escape(getattr(x, "definition", ""))}">{html.escape(x)}\n'
                     for x in head), *('<td>' + '<td>'.join(map(cell, line)) for line in body)]
    return '\n'.join(['<div class="scroll"><table>', *(f'<tr>{line}' for line in cells),
                      '</table></div>'])
