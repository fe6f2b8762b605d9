"""configs"""

import configs
import dataclasses
import evaluate
import pytest
import signal
import subprocess
import sys
import train
from data import DataError, forked_pool
from data.demo import WorldSpec
from typing import Literal

from common import HERE, config


def test_config_file_then_command_line(tmp_path):
    cfg = config(tmp_path, '"""why"""\nlr = 1\nmax_steps = 5\neval_tasks = ["mmlu"]\n',
                 '--smoothing=0.1', '--max_steps=None', '--betas=0.9,0.95', '--dry_run',
                 '--model=a=b', '--eval_tasks=mmlu,arc_easy:some/place')
    assert cfg.lr == 1.0 and type(cfg.lr) is float
    assert cfg.max_steps is None and cfg.betas == (0.9, 0.95) and cfg.dry_run is True
    assert cfg.model == 'a=b' and cfg.eval_tasks == ('mmlu', 'arc_easy:some/place')
    assert configs.load_config(train.TrainConfig, ['--lr=1']).lr == 1.0


@pytest.mark.parametrize('content, argument, message', [
    ('smothing = 0.1', '', "experiment.py:1: there is no key 'smothing'; did you mean 'smoothing'"),
    ('', '--learningrate=1', "--learningrate: there is no key 'learningrate'"),
    ('lr = 1\nepochs = "two"', '', "experiment.py:2: epochs is 'two', a str; wanted a float"),
    ('', '--batch_size=1.5', '--batch_size is 1.5, a float; wanted an int'),
    ('', '--lr=high', "--lr is 'high', a str; wanted a float"),
    ('', '--schedule=step', "'step', a str; wanted 'linear' or 'cosine'"),
    ('', '--add_bos=1', 'wanted True or False'),
    ('', '--lr', '--lr: needs a value'),
    ('lr = 2 * 1e-5', '', 'experiment.py:1: the value of lr must be a plain literal'),
    ('import os', '', 'experiment.py:1: a config file holds only'),
    ('lr = (', '', 'experiment.py:1: not valid Python'),
    ('', 'configs/demo.py', 'a config file comes first'),
    ('lr = 1\nepochs = 2\nlr = 2', '', 'experiment.py:3: lr is set already at {}/experiment.py:1'),
    ('shape = {"a": 1,\n"b": 2, "a": 3}', '',
     "experiment.py:2: shape has the key 'a' already at {}/experiment.py:1"),
    ('shape = {[]: 1}', '', 'the value of shape must be a plain literal'),
    ('lr = 1e999', '', 'lr is inf'),
    ('', f'--lr={"9" * 400}', 'wanted a float'),
    ('', '--shape={[]: 1}', 'wanted a dict'),
    ('x = "' + '\\0', '', 'experiment.py:1: not valid Python'),
])
def test_config_errors(tmp_path, content, argument, message):
    with pytest.raises(configs.ConfigError, match='.') as error:
        config(tmp_path, content, *filter(None, [argument]))
    assert message.replace('{}', str(tmp_path)) in str(error.value)


def test_config_files_are_utf8(tmp_path):
    path = tmp_path / 'experiment.py'
    path.write_bytes(b'\xef\xbb\xbfmodel = "caf\xc3\xa9"\r\nlr = 1\r\n')
    assert configs.load_config(train.TrainConfig, [str(path)]).model == 'caf\u00e9'
    path.write_bytes(b'lr = 1\nmodel = "caf\xe9"\n')
    with pytest.raises(configs.ConfigError, match='experiment.py:2: not UTF-8'):
        configs.load_config(train.TrainConfig, [str(path)])


@dataclasses.dataclass
class Small:
    """What test_help reads."""
    # first part
    name: str = 'x'             # what it is called
    sizes: tuple[int, ...] = (1, 2)     # of its parts, a long comment that
    #                             goes on in a second line
    places: dict = dataclasses.field(default_factory=dict)
    # said before
    kind: Literal['a', 'b'] = 'a'


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        configs.load_config(Small, ['--name=y', '--help'],
                            'usage: python small.py [--key=value ...]\n\n    python small.py')
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    lines = [' '.join(line.split()) for line in out.split('\n')]
    assert lines == ['usage: python small.py [--key=value ...]', '', 'python small.py', '', 'keys:',
                     '# first part', '--name=x (a string) what it is called',
                     '--sizes=1,2 (a tuple of int) of its parts, a long comment that goes on in a',
                     'second line', '--places={} (a dict)', '# said before',
                     "--kind=a ('a' or 'b')", '']
    for module, cls in ((train, train.TrainConfig), (evaluate, evaluate.EvalConfig)):
        with pytest.raises(SystemExit):
            configs.load_config(cls, ['-h'])
        out = capsys.readouterr().out
        assert out.startswith('usage: python ') and module.__doc__.strip() in out
        assert all(f'\n  --{f.name}=' in out for f in dataclasses.fields(cls))
        assert max(map(len, out.split('\n'))) <= 100 and 'def ' not in out


def test_config_is_data_not_code(tmp_path):
    with pytest.raises(configs.ConfigError):
        config(tmp_path, f'model = open({str(tmp_path / "made")!r}, "w").name')
    assert not (tmp_path / 'made').exists()


def action_of_sigterm(_):
    return signal.getsignal(signal.SIGTERM)


def test_workers_end_by_sigterm():
    """Pool ends them so; with train.py's handler in them one pool in forty never ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with forked_pool(2) as pool:
            assert pool.map(action_of_sigterm, range(8)) == [signal.SIG_DFL] * 8
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with pytest.raises(DataError, match='bad'):
            with forked_pool(2):
                raise DataError('bad')
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_that_is_ended_at_once(tmp_path):
    """SIGTERM right after the fork ran the parent's handler; one pool in a few hundred hung."""
    code = """
import signal, sys
from data import forked_pool
signal.signal(signal.SIGTERM, lambda *_: print('the handler of the parent ran', flush=True))
for _ in range(300):
    try:
        with forked_pool(2):
            raise ValueError
    except ValueError:
        pass
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=HERE, capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_include(tmp_path):
    (tmp_path / 'shared.py').write_text('lr = 1e-3\nepochs = 3\n')
    cfg = config(tmp_path, "include = 'shared.py'\nepochs = 1", '--batch_size=8')
    assert (cfg.lr, cfg.epochs, cfg.batch_size) == (1e-3, 1.0, 8)
    for shared, line, message in (
            ('lr = 1e-3', "include = 3", 'py:1: include is 3; wanted the name of a file beside'),
            ('lr = 1e-3', "include = 'none.py'", 'cannot read the config file .*none.py'),
            ('\nlrr = 1e-3', "include = 'shared.py'", "shared.py:2: there is no key 'lrr'"),
            ("include = 'x.py'", "include = 'shared.py'", 'shared.py:1: .* can include none')):
        (tmp_path / 'shared.py').write_text(shared)
        with pytest.raises(configs.ConfigError, match=message):
            config(tmp_path, line)


def test_resolved_config_reads_back(tmp_path):
    cfg = config(tmp_path, 'smoothing = 0.1\nruns = {"a": {"lr": 1e-3}}', '--max_steps=3')
    assert config(tmp_path, configs.dump_config(cfg)) == cfg


def test_shipped_configs_load():
    shipped = sorted((HERE / 'configs').glob('[!_]*.py'))
    assert {'demo', 'gemma2_ls01', 'llama3_8b_ls01', 'llama32_1b_ls01', 'mistral_7b_ls01',
            'paper_openinstruct'} <= {path.stem for path in shipped}
    for path in shipped:
        for one in train.expand_seeds(configs.load_config(train.TrainConfig, [str(path)])):
            train.expand_runs(one)
    for path in (HERE / 'configs' / 'study').glob('*.py'):
        cfg = configs.load_config(train.TrainConfig, [str(path)])
        for one in train.expand_seeds(cfg):
            configs.override(WorldSpec(), one.world, 'world')
            for _, run in train.expand_runs(one):
                train.check(run)
                assert '{' not in repr((run.model, run.data, run.eval_tasks))


def test_vary_and_seeds(tmp_path):
    cfg = config(tmp_path, '''
seeds = (3, 5)
model = '{out_dir}/base-D{D}'
vary = {'D': (64, 256), 'cap': (None, 30.0), 's': (0.0, 0.1)}
runs = {
    'base': {'from_scratch': True, 'shape': {'hidden_size': '{D}', 'x': ('{cap}', 'c{cap}')}},
    'tuned': {'model': '{out_dir}/base-D{D}-cap{cap}', 'smoothing': '{s}', 'cache_dir': '{seed}/c'},
}''', '--out_dir=place', '--vary.D=64,', '--vary.cap=None,30.0')
    three, five = train.expand_seeds(cfg)
    assert (three.seed, five.seed, five.out_dir) == (3, 5, 'place/seed-5')
    runs = dict(train.expand_runs(five))
    assert list(runs) == ['base-D64-capNone', 'base-D64-cap30.0'] + [
        f'tuned-D64-cap{c}-s{s}' for c in (None, 30.0) for s in (0.0, 0.1)]
    assert runs['base-D64-capNone'].shape == {'hidden_size': 64, 'x': (None, 'cNone')}
    last = runs['tuned-D64-cap30.0-s0.1']
    assert (last.model, last.smoothing, last.cache_dir, last.out_dir, last.vary) == (
        'place/seed-5/base-D64-cap30.0', 0.1, '5/c', 'place/seed-5/tuned-D64-cap30.0-s0.1', {})
    only = dataclasses.replace(five, only=('tuned-D64-capN',))
    assert [n for n, _ in train.expand_runs(only)] == [f'tuned-D64-capNone-s{s}'
                                                       for s in (0.0, 0.1)]
    for change, message in (({'only': ('x',)}, 'no run is called so; there are base, tuned'),
                            ({'vary': {'E': (1,)}}, 'no run mentions {E}'),
                            ({'vary': {'s': ('much',), 'D': (1,), 'cap': (1,)}},
                             "smoothing is 'much'"),
                            ({'vary': {'D': 64}}, 'D is 64; wanted values in a tuple, or a dict'),
                            ({'vary': {'D': {64: 1}}}, 'wanted values in a tuple, or a dict'),
                            ({'vary': {'D': (64,), 's': (0.1,)}},
                             'runs: base-D64: vary gives nothing to put in for {cap}')):
        with pytest.raises(configs.ConfigError, match=message):
            train.expand_runs(dataclasses.replace(five, **change))
    paired = dataclasses.replace(
        five, vary={'D': {64: {'r': 1e-3}, 256: {'r': 2e-3}}, 's': (0.0, 0.1)},
        runs={'a': {'lr': '{r}', 'model': 'm{D}', 'smoothing': '{s}'}})
    assert [(n, r.lr, r.model, r.smoothing) for n, r in train.expand_runs(paired)] == [
        (f'a-D{d}-s{s}', r, f'm{d}', s) for d, r in ((64, 1e-3), (256, 2e-3)) for s in (0.0, 0.1)]
    assert train.fill({'a': ['{D}', 'x{D}']}, {'D': 3}) == {'a': [3, 'x3']}
    with pytest.raises(configs.ConfigError, match='one of them twice'):
        train.expand_seeds(dataclasses.replace(cfg, seeds=(1, 1)))
    for arguments, message in ((['--demo_world=w', '--world.entities=30000'],
                                'make 22500 names, not 30000'),
                               (['--demo_world=w', '--world.documents=20', '--world.entities=50',
                                 '--world.instructions=9', '--world.questions=9',
                                 '--world.vocab_sizes=90000,'], 'Vocabulary size too high'),
                               (['--demo_world=w', '--world.forms=("letter4",)'],
                                "form 'letter4'; wanted 'text' or 'letters' and 2 to 24 options"),
                               (['--demo_world=w', '--world.forms=("text25",)'], "form 'text25'"),
                               (['--demo_world=w', '--world.unseen_questions=5'],
                                'unseen_questions = 5 with unseen = 0'),
                               (['--world.entities=3'], 'needs demo_world')):
        with pytest.raises(configs.ConfigError, match=message):
            train.main([*(a.replace('=w', f'={tmp_path / "w"}') for a in arguments),
                        f'--out_dir={tmp_path / "run"}'])
    with pytest.raises(configs.ConfigError, match='needs from_scratch = True'):
        train.check(dataclasses.replace(config(tmp_path, ''), shape={'hidden_size': 8}))
    with pytest.raises(configs.ConfigError, match="no key 'entties'; did you mean 'entities'"):
        configs.override(WorldSpec(), {'entties': 3}, 'world')


RUNS = 'runs = {"a": {"lr": 1.0, "seed": 1}, "b": {"model": "{out_dir}/a"}}'


def test_runs_and_the_command_line(tmp_path):
    cfg = config(tmp_path, RUNS, '--epochs=3', '--runs.a.lr=2', '--out_dir=place')
    (_, first), (_, second) = train.expand_runs(*train.expand_seeds(cfg))
    assert first.lr == 2.0 and second.lr == 2e-5 and first.seed == 1
    assert first.epochs == second.epochs == 3.0
    assert second.model == 'place/a' and first.out_dir == 'place/a'


@pytest.mark.parametrize('content, argument, message', [
    (RUNS, '--lr=2', 'the runs a set lr themselves; say which one, as in --runs.a.lr='),
    (RUNS, '--runs.c.lr=2', '--runs.c.lr: there is no runs.c in the config'),
    (RUNS, '--runs.a.lr=x', "--runs.a.lr is 'x', a str; wanted a float"),
    ('runs = {"a": {"smothing": 0.1}}', None, "did you mean 'smoothing'"),
    ('runs = {"../a": {}}', None, "'../a' is not a name for a folder"),
    ('runs = {1: {}}', None, '1 is not a name for a folder'),
    ('runs = {"a": {"out_dir": "x"}}', None, 'out_dir is the same for all runs'),
    ('runs = {"a": {"eval_tasks": ("mmlu",)}}', None, 'eval_tasks is the same for all runs'),
])
def test_bad_runs(tmp_path, content, argument, message):
    with pytest.raises(configs.ConfigError) as error:
        train.expand_runs(config(tmp_path, content, *filter(None, [argument])))
    assert message in str(error.value)
