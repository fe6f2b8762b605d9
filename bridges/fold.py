"""Divide the logits of a saved model by a fitted temperature, in its weights.

    python -m bridges.fold --model=out/run --scaling=out/run/scaling.json --out_dir=out/run_scaled

transformers, vLLM and GGUF converters then see the temperature: it is in the last norm, which only
the output matrix reads. cap * tanh(x / cap) / T is the same function with cap / T and x / T.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compare import scaling
from model import Norm
from runtime import checkpoint, cli, ownership, saving
from runtime.config import load_config, require_given
from runtime.errors import ConfigError

README = """\
# {name}, logits divided by {temperature:.4g}

The weights are those of {model}. The last norm{cap} is divided by the temperature
{temperature!r}, which was fitted to {task} and is in {scaling}. Greedy answers stay the same;
sampling at temperature 1 is that of the original at {temperature:.4g}, up to rounding to {dtype}.

This is exactly the fitted scaling where every option is one token, such as a letter. For options of
several tokens it is not, since the temperature was fitted to the log-probability of the whole
option: evaluate this folder again before you state its calibration.
"""


@dataclass
class FoldConfig:
    model: str = ''             # a folder in Hugging Face layout, or a hub name
    scaling: str = ''           # scaling.json of evaluate.py --fit_temperature
    task: str = ''              # a task in it; may be left out if there is one
    out_dir: str = ''           # folder of the new model, which must be empty or missing


def fold(model, temperature):
    """Divide the logits of a CausalLM by `temperature`, in place; ConfigError if it has no norm."""
    last, cap = model.decoder.norm, model.config.final_logit_softcapping
    if not isinstance(last, Norm) or model.config.reward:
        raise ConfigError(f'{model.config.model_type}: this model has no last norm before an '
                          f'output matrix, so no temperature can be folded in; divide the logits')
    with torch.no_grad():
        offset = 1 if last.kind == 'gemma' else 0
        last.weight.copy_((last.weight.double() + offset) / temperature - offset)
        if last.bias is not None:
            last.bias.copy_(last.bias.double() / temperature)
    model.config = replace(model.config, final_logit_softcapping=cap and cap / temperature)


def main(argv):
    cfg = load_config(FoldConfig, argv, __doc__)
    require_given(cfg, model='out/run', scaling='out/run/scaling.json', out_dir='out/run_scaled')
    try:
        fits = scaling.load(cfg.scaling)
    except (OSError, ValueError) as error:
        raise ConfigError(f'scaling = {cfg.scaling!r} cannot be read: {error}') from None
    # mmlu.contextual and mmlu.permuted have temperatures, too, but of other scores than the logits
    tasks = [task for task, by_name in fits.items() if 'temperature' in by_name and '.' not in task]
    if cfg.task not in tasks if cfg.task else len(tasks) != 1:
        raise ConfigError(f'task = {cfg.task!r}: name one of those with a temperature in '
                          f'{cfg.scaling}: {", ".join(tasks) or "there is none"}')
    task = cfg.task or tasks[0]
    temperature, = fits[task]['temperature']
    if not 0.0011 < temperature < 999:      # see scaling.fit_temperature
        raise ConfigError(f'the temperature of {task} in {cfg.scaling}, {temperature:g}, is an end '
                          f'of its range, so no temperature is best: fit one on other questions')
    model = checkpoint.load(folder := checkpoint.fetch(cfg.model))
    dtype = model.config.dtype
    capped = bool(model.config.final_logit_softcapping)
    fold(model, temperature)
    text = README.format(name=Path(cfg.model).name, model=cfg.model, temperature=temperature,
                         cap=' and the cap of the logits' * capped, task=task, scaling=cfg.scaling,
                         dtype=dtype)
    with ownership.lock(cfg.out_dir):
        names = {path.name for path in Path(cfg.out_dir).iterdir()}
        if others := sorted(names - {ownership.LOCK, ownership.LIST}):
            raise ConfigError(f'{cfg.out_dir} is not empty, it holds {", ".join(others[:3])}; '
                              f'choose another --out_dir')
        saving.save(model, cfg.out_dir, getattr(torch, dtype), folder,
                        more={'README.md': text}, owner=cfg.out_dir)
    print(f'wrote the model with temperature {temperature:.4f} of {task} to {cfg.out_dir}')


if __name__ == '__main__':
    with cli.one_line_errors():
        main(sys.argv[1:])
