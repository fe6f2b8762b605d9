"""Install the files that other projects import as the package `nanocal`; see pyproject.toml.

The files stay where a reader of the clone expects them. Only the installed package has them in one
folder: `fused_ce.py` becomes `nanocal.fused_ce`, `runtime/optim.py` becomes `nanocal.optim`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ('fused_ce.py', 'metrics.py', 'scaling.py', 'stats.py', 'model.py', 'attention.py',
         'triton_ops.py', 'runtime/optim.py', 'results/prediction_files.py')


class BuildPackage(build_py):
    def find_modules(self):
        return [('nanocal', Path(file).stem, file) for file in FILES]

    def run(self):
        super().run()
        package = Path(self.build_lib, 'nanocal')
        version = self.distribution.get_version()
        (package / '__init__.py').write_text(f"__version__ = '{version}'\n")
        (package / 'py.typed').touch()      # the type hints are for users as well (PEP 561)


setup(py_modules=['nanocal'], cmdclass={'build_py': BuildPackage})
