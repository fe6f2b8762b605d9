"""The command `nanocal` of the installed package: prediction files of any origin, with numpy alone.

    nanocal metrics predictions.csv
    nanocal compare base.csv tuned.csv --out_dir=out/compare
    nanocal report predictions.csv --out_dir=out/report

In a clone it is `python -m results.command`.
"""

import sys
from pathlib import Path

if __package__ == 'nanocal':    # installed as nanocal/__main__.py, beside the folders of a clone
    sys.path.insert(0, str(Path(__file__).parent))

from results import compare, file_report, prediction_files
from runtime import cli
from runtime.version import __version__

COMMANDS = {
    'metrics': lambda argv: prediction_files.main(argv, 'nanocal metrics'),
    'compare': lambda argv: compare.main(argv, compare.USAGE.replace(
        'python evaluate.py --compare', 'nanocal compare').replace(
        'python metrics.py', 'nanocal metrics')),
    'report': file_report.main}


def main():
    """Run the command that the first argument names."""
    cli.begin()
    with cli.one_line_errors():
        name = ''.join(sys.argv[1:2])
        if name == '--version':
            return print(__version__)
        if name not in COMMANDS:
            raise SystemExit(f'usage: nanocal {{{",".join(COMMANDS)}}} FILE [...]; nanocal metrics '
                             f'--help lists the forms of a FILE')
        COMMANDS[name](sys.argv[2:])


if __name__ == '__main__':
    main()
