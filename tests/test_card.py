"""bridges/card.py and --push_to_hub: the model card of a run's folder, and what is sent."""

import json
from unittest import mock

import pytest
import yaml
from common import results_of, write_results, write_run

from bridges import card, hub
from results import report, samples
from runtime import checkpoint, log, ownership, resume, sources
from runtime.errors import CheckpointError
from train import FREE_KEYS, TrainConfig


def reported(folder, sharpness):
    """A run's folder whose results.json has the metrics of its samples."""
    write_run(folder, n=200, sharpness=sharpness, settings={
        'model': 'google/gemma-3-270m', 'data': 'allenai/tulu', 'smoothing': 0.1})
    results = results_of(folder)
    results['tasks']['mmlu'] |= report.summarize(
        samples.read_samples(folder / 'samples.jsonl'), 'token', n_bootstrap=50, fit=True)
    (folder / 'config.json').write_text('{}')
    (folder / 'model.safetensors').write_text('')
    name = 'google/gemma-3-270m' if folder.name == 'before' else str(folder)
    write_results(folder, results | {'config': {'model': name},
                                     'identity': {'model': checkpoint.fingerprint(folder)}})
    return results['tasks']['mmlu']


def written(folder):
    """Write the card of a folder; return its text."""
    card.write(folder)
    return (folder / card.NAME).read_text()


def test_the_card_has_the_results_before_and_after_and_an_edited_one_stays(tmp_path, capsys):
    run = tmp_path / 'run'
    before, after = reported(run / 'before', 0.5), reported(run, 3.0)
    (run / samples.DIAGRAM).write_bytes(b'')
    text = written(run)
    head = yaml.safe_load(text.split('---\n')[1])
    assert (head['base_model'], head['datasets']) == ('google/gemma-3-270m', ['allenai/tulu'])
    (result,) = head['model-index'][0]['results']
    values = {x['type']: x['value'] for x in result['metrics']}
    assert values == {key: round(after['pooled'][key], 4) for key in ('accuracy', 'ece')}
    for part in (before, after):
        ece, (low, high) = part['pooled']['ece'], part['pooled']['intervals']['ece']
        assert f'{ece:.3f} [{low:.3f}, {high:.3f}]' in text
    temperature, = after['post_hoc']['fits']['temperature']
    assert f'{temperature:.3f}' in text and '![reliability diagrams](reliability.png)' in text
    # renewed after another evaluation, while its first line says so
    reported(run, 2.0)
    again = written(run)
    assert again != text and again.startswith(f'---\n{card.OURS}')
    for mine in (again.replace(card.OURS, ''), f'---\nlicense: mit\n---\n{again}', '', '# mine'):
        (run / card.NAME).write_text(mine)
        assert written(run) == mine and 'stays as' in capsys.readouterr().out


def test_the_name_of_a_folder_is_plain_text_in_the_card(tmp_path):
    run = tmp_path / 'a](x)\n## <b> `c` 1_2'
    reported(run, 3.0)
    lines = written(run).split('\n')
    assert r'# a\](x) \#\# \<b\> \`c\` 1_2' in lines and '## <b> `c` 1_2' not in lines


def test_a_card_has_no_numbers_of_another_model(tmp_path, capsys):
    run = tmp_path / 'run'
    reported(run / 'before', 0.5)
    reported(run, 3.0)
    content = results_of(run)
    own = content['identity']
    for identity in (own, {'model': 'other'}, {}, own | {'base': 'dropout'}):
        write_results(run, content | {'identity': identity})
        assert ('## Calibration' in written(run)) == (identity == own), identity
        assert ('which the card leaves out' in capsys.readouterr().out) != (identity == own)
    write_results(run, content)
    for name, shown in (('google/gemma-3-270m', True), ('google/gemma-3-1b', False)):
        write_results(run / 'before', results_of(run / 'before') | {'config': {'model': name}})
        assert ('| before |' in written(run)) == shown
    for text in (json.dumps(content | {'seed': 1}), '5', '[' * 100_000, '{"tasks": []}', ''):
        (run / 'results.json').write_text(text)
        assert '## Calibration' not in written(run)
        assert 'results.json is not what this program wrote' in capsys.readouterr().out


def test_epochs_and_adapters_have_cards_that_the_hub_reads_and_that_the_run_owns(tmp_path):
    from huggingface_hub import ModelCard
    run = tmp_path / 'run'
    after = reported(run, 3.0)
    with open(run / 'train_config.py', 'a') as settings:
        settings.write("lora = True\nlora_rank = 4\ndata_limit = 60\nreward = '/home/me/judge'\n")
    for place in ('adapter', 'epoch-1/adapter'):
        (run / place).mkdir(parents=True)
        (run / place / 'adapter_config.json').write_text('{}')
    (run / 'epoch-1' / 'config.json').write_text('{}')
    for folder in (run, run / 'epoch-1'):
        card.write(folder)
    names = 'README.md', 'adapter/README.md', 'epoch-1/README.md', 'epoch-1/adapter/README.md'
    assert {*ownership.written_files(run)} == {*names}
    model, adapters, epoch, epoch_adapters = (ModelCard.load(run / name) for name in names)
    assert (model.data.library_name, adapters.data.library_name) == ('transformers', 'peft')
    assert adapters.data.base_model == 'google/gemma-3-270m' and 'LoRA adapters of' in adapters.text
    for result in (model.data.eval_results[1], adapters.data.eval_results[1]):
        assert (result.dataset_name, result.metric_type, result.metric_value) == (
            'mmlu', 'ece', round(after['pooled']['ece'], 4))
    assert not epoch.data.eval_results and ', after epoch 1.' in epoch.text
    assert epoch_adapters.data.model_name == 'run-epoch-1' and '| lora_rank | `4` |' in epoch.text
    assert '| data_limit | `60` |' in epoch.text
    assert '`judge`' in epoch.text and '/home' not in epoch.text

    # evaluated, and edited: as that of the run
    reported(run / 'epoch-1', 2.0)
    (run / 'epoch-1' / 'train_config.py').unlink()
    (run / names[3]).write_text('mine')
    card.write(run / 'epoch-1')
    assert '| mmlu | after | 200 |' in (run / names[2]).read_text()
    assert {*ownership.written_files(run)} == {*names}      # whose lock may be another process's
    assert (run / names[3]).read_text() == 'mine'


def test_a_path_is_no_hub_name_also_if_nothing_is_there_any_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reported(tmp_path / 'run', 3.0)
    (tmp_path / 'run' / 'train_config.py').unlink()
    (tmp_path / 'out' / 'base').mkdir(parents=True)
    cfg = TrainConfig(model='out/base', data='allenai/tulu', out_dir='run', resume=True)
    log.open_log(cfg, 0).close()
    resume.check_run(cfg, FREE_KEYS)        # resumed under the same name
    (tmp_path / 'out' / 'base').rmdir()
    text = written(tmp_path / 'run')
    assert 'base_model' not in text and '`base`, trained with nanoCal on `allenai/tulu`' in text
    assert sources.is_hub_name('google/gemma-3-270m')
    for path in ('/a/b', './a', '../a', '~/a', 'a/b/c', 'mmlu:a/b', 'a', 'a/'):
        assert not sources.is_hub_name(path)


def test_what_is_sent_to_the_hub(tmp_path, monkeypatch):
    api = mock.MagicMock()
    monkeypatch.setattr('huggingface_hub.HfApi', lambda: api)
    hub.upload(tmp_path, 'me/model', ['config.json', 'README.md'])
    api.create_repo.assert_called_once_with('me/model', private=True, exist_ok=True)
    api.upload_folder.assert_called_once_with(
        repo_id='me/model', folder_path=str(tmp_path), commit_message=mock.ANY,
        allow_patterns=['config.json', 'README.md'])
    api.upload_folder.side_effect = OSError('401 Client Error')
    with pytest.raises(CheckpointError, match='me/model failed .*401.*; the run is complete'):
        hub.upload(tmp_path, 'me/model', ['config.json'])
