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
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TABLE = HERE / 'tests' / 'mutants.csv'
tree = None     # the copy of the repository that this worker changes


def prepare(folder):
    """Copy the repository below `folder`, and import what all tests need, once in each worker."""
    global tree
    tree = Path(tempfile.mkdtemp(dir=folder), 'repository')
    shutil.copytree(HERE, tree, ignore=shutil.ignore_patterns(
        '__pycache__', 'out', '.mypy_cache', '.hypothesis'))
    if (HERE.parent / 'shared').exists():
        (tree.parent / 'shared').symlink_to((HERE.parent / 'shared').resolve())
    os.environ['TRITON_INTERPRET'] = '1'
    import numpy, torch, transformers    # noqa: E401, F401
    torch.set_num_threads(1)


def notice(row):
    """Return the name of the first test that fails with the fault of `row`, or ''."""
    path = tree / row['file']
    source = path.read_text()
    path.write_text(source.replace(row['text'], row['replacement']))
    try:
        return first_failure([f'tests/test_{name}.py' for name in row['tests'].split(',')])
    finally:
        path.write_text(source)


def first_failure(files):
    """Run test files in a fork until one fails; return the name of that test, or ''."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with open(read) as file:
            name = file.read()
        os.waitpid(pid, 0)
        return name
    os.chdir(tree)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.path[:] = [str(tree), str(tree / 'tests'),
                   *(path for path in sys.path if path != str(HERE / 'tests'))]
    import pytest

    class Failures:
        names = []

        def note(self, report):
            if report.failed:
                self.names.append(report.nodeid)
        pytest_runtest_logreport = pytest_collectreport = note

    code = pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', *files],
                       [Failures()])
    os.write(write, [*Failures.names, f'exit {code}' if code else ''][0].encode())
    os._exit(0)


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
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(
            options.processes, multiprocessing.get_context('fork'), prepare, (folder,)) as pool:
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
