"""Tables of cells, header first, and sections of a report, as text, Markdown, LaTeX and CSV."""

import csv
import io
import re
from typing import NamedTuple

from results.markdown import markdown


class Section(NamedTuple):
    """What a report says of a task: a table, the notes below it, lines of text, and more tables."""
    title: str
    table: list     # of cells
    notes: list
    more: list      # [(title or '', cells)]

    def as_text(self):
        more = (f'\n{title}\n{aligned(table)}' if title else f'\n{aligned(table)}'
                for title, table in self.more)
        return '\n'.join(['', self.title, aligned(self.table), *self.notes, *more])

    def as_markdown(self):
        more = (f'{title}:\n\n' * bool(title) + markdown(table) for title, table in self.more)
        return '\n'.join([f'### {self.title}\n', markdown(self.table),
                          *(f'{line}\n' for line in self.notes), *more])

    def as_latex(self):
        return '\n'.join([latex(self.table, self.title),
                          *(f'{latex_text(line)}\n' for line in self.notes),
                          *(latex(table, title) for title, table in self.more)])


def mark_best(lines, groups):
    """Append ' *' to the best cells of each column with a `Heading`, among lines of one group."""
    marked = [list(line) for line in lines]
    for column, heading in enumerate(lines[0]):
        better, values = getattr(heading, 'higher_is_better', None), {}
        for line, group in zip(marked[1:], groups, strict=True) if better is not None else ():
            if line[column] not in ('', 'nan'):
                value = float(line[column].split()[0])
                values.setdefault(group, []).append((value if better else -value, line))
        for pairs in values.values():
            worst, best = (f(value for value, _ in pairs) for f in (min, max))
            for value, line in pairs:
                if worst < value == best:
                    line[column] += ' *'
    return marked


def aligned(lines):
    """Return cells as text, the first column aligned left, the numbers of the others right."""
    columns = [[*column] for column in zip(*lines, strict=True)]
    for column in columns:
        if any(cell.endswith(' *') for cell in column[1:]):
            column[1:] = [cell if cell.endswith(' *') else cell + '  ' for cell in column[1:]]
        width = max(map(len, column))
        column[:] = [cell.rjust(width) if column is not columns[0] else cell.ljust(width)
                     for cell in column]
    texts = ['  '.join(line) for line in zip(*columns, strict=True)]
    return '\n'.join([texts[0], '-' * len(texts[0]), *texts[1:]])


def latex(lines, title=''):
    r"""Return lines of cells as a LaTeX table below its title; it needs \usepackage{booktabs}.

    A cell that ends in ' *' becomes bold, the interval of '0.102 [0.091, 0.113]' becomes
    \confint{0.091}{0.113}, which prints nothing unless the document defines that command.
    """
    def cell(text):
        text, low, high, star = re.fullmatch(r'(.*?)(?: \[(\S+), (\S+)\])?( \*)?\s*', text,
                                             re.DOTALL).groups()
        text = rf'\textbf{{{latex_text(text)}}}' if star else latex_text(text)
        return text + (rf'\confint{{{latex_text(low)}}}{{{latex_text(high)}}}' if low else '')

    head, *body = [' & '.join(map(cell, line)) + r' \\' for line in lines]
    top = [rf'\noindent {latex_text(title)}\par\smallskip'] if title else []
    top += [r'\providecommand{\confint}[2]{}'] if any(r'\confint' in line for line in body) else []
    return '\n'.join([*top, f'\\begin{{tabular}}{{l{"r" * (len(lines[0]) - 1)}}}', r'\toprule',
                      head, r'\midrule', *body, r'\bottomrule', r'\end{tabular}', ''])


def latex_text(text):
    """Return text as LaTeX prints it; `[` and `*` in braces: a row may begin with them."""
    escape = {'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
              '<': r'\textless{}', '>': r'\textgreater{}', '|': r'\textbar{}', '±': r'$\pm$'}
    escape |= {c: f'\\{c}' for c in '&%$#_{}'} | {c: f'{{{c}}}' for c in '[*'}
    text = text.translate(str.maketrans(escape)).replace('--', '-{}-')      # -- would be a dash
    return re.sub(r'(?<!\S)-(?=\d)', '$-$', text)


def csv_text(lines):
    """Return a CSV of dicts; its columns are all their keys, in order of first occurrence."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)),
                            lineterminator='\n')
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
