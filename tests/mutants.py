"""Small faults in the product's code, and which tests notice them.

    python tests/mutants.py                        # all rows of tests/mutants.csv
    python tests/mutants.py --only=metrics.py,draw # those whose file or name holds a text
    python tests/mutants.py --check                # only whether each text is found once

A row of mutants.csv is a fault: in a copy of the repository, `text`, which occurs once in `file`,
is replaced, and the test files of its room run until one fails. The name of that test becomes the
row's last cell; a row whose last cell is empty needs a test.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent.parent
TABLE = HERE / 'tests' / 'mutants.csv'
IGNORED = shutil.ignore_patterns('__pycache__', 'out', '.mypy_cache', '.hypothesis')
SHARED = os.environ.get('NANOCAL_SHARED', str(HERE.parent / 'shared'))
# a test, or a file that cannot be imported, in pytest's summary, where a message may follow
FAILED = r'^(?:FAILED|ERROR) (\S+?::\w+(?:\[.*\])?|\S+)(?: - .*)?$'
trees = SimpleQueue()       # copies of the repository that no mutant is in


def notice(row):
    """Return the name of the first test that fails with the fault of `row`, or ''."""
    tree = trees.get()
    path, files = tree / row['file'], [f'tests/test_{name}.py' for name in row['tests'].split(',')]
    source = path.read_text()
    path.write_text(source.replace(row['text'], row['replacement']))
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-xq', '--tb=no', '-pno:cacheprovider', '-pno:xdist',
         *files], cwd=tree, capture_output=True, text=True,
        env=os.environ | {'TRITON_INTERPRET': '1', 'NANOCAL_SHARED': SHARED})
    path.write_text(source)
    trees.put(tree)
    failed = re.search(FAILED, done.stdout, re.M)
    return failed[1] if failed else f'exit {done.returncode}' if done.returncode else ''


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--only', default='', help='texts of names or files, with commas')
    parser.add_argument('--check', action='store_true', help='only find the texts')
    parser.add_argument('--processes', type=int, default=2)
    options = parser.parse_args()
    with open(TABLE, newline='') as file:
        rows = [*csv.DictReader(file)]
    chosen = [row for row in rows if any(text in row['mutant'] or text in row['file']
                                         for text in options.only.split(','))]
    counts = [(HERE / row['file']).read_text().count(row['text'])
              if (HERE / row['file']).exists() else 0 for row in chosen]
    for row, n in zip(chosen, counts, strict=True):
        if n != 1:
            print(f'{row["mutant"]}: {row["file"]} holds the text {n} times: {row["text"]}')
    if options.check or {*counts} > {1}:
        print(f'{len(chosen)} mutants, {len(counts) - counts.count(1)} without their text')
        sys.exit(counts.count(1) < len(counts))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        for number in range(options.processes):
            trees.put(Path(shutil.copytree(HERE, f'{folder}/{number}', ignore=IGNORED)))
        for row, name in zip(chosen, pool.map(notice, chosen), strict=True):
            row['noticed by'] = name
            print(f'{row["mutant"]} ({row["file"]}): {name or "NOT NOTICED"}', flush=True)
            with open(TABLE, 'w', newline='') as file:
                table = csv.DictWriter(file, rows[0], lineterminator='\n')
                table.writeheader()
                table.writerows(rows)
    print(f'{sum(bool(row["noticed by"]) for row in chosen)} of {len(chosen)} noticed')


if __name__ == '__main__':
    main()
