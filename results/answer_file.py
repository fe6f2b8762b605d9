"""The file of generate.py, one line per prompt: open it for more answers, and write a row."""

import glob
import json
import math
from pathlib import Path

from results.samples import (difference, has_lines, merge_parts, merged_names, part_names,
                             read_jsonl)
from runtime import ownership
from runtime.errors import ConfigError, DataError

OTHERS = 'log.jsonl', 'samples.jsonl'       # they grow; see train.py and evaluate.py


def open_answers(cfg, settings, processes):
    """Prepare the file `out`; return {(id, hash of the prompt)} of the rows in it.

    The settings are in a file beside it: answers.config.json for answers.jsonl. Each of several
    processes will append to a part of its own, see `samples.part`. Raises ConfigError
    if this program did not write it, or with other settings. The caller holds the lock of its
    folder.
    """
    out = Path(cfg.out)
    names = out.name, f'{out.stem}.config.json'
    parts = part_names(out, processes)
    ownership.check_free(out.parent, *names, *parts)
    listed = ownership.written_files(out.parent)
    if out.name in OTHERS or (names[0] in listed) != (names[1] in listed):
        raise ConfigError(f'{out} has the name of a file that another script writes, and is not '
                          f'replaced; choose another --out, such as answers.jsonl')
    if cfg.overwrite:
        ownership.set_aside(out.parent, out.name, [*map(glob.escape, (
            *names, *parts, *merged_names(out)))], [*map(glob.escape, (out.name, *parts))])
    if out.is_symlink():
        raise ConfigError(f'{out} is a link to a file elsewhere, where nothing is appended; choose '
                          f'another --out')
    done, advice = set(), 'choose another --out, or --overwrite'
    if has_lines(out):
        with ownership.read_json(out.with_name(names[1]), advice) as content:
            other = difference(settings, content)
        if other:
            raise ConfigError(f'{out} has answers {other}; {advice}')
        merge_parts(out)
        for line, row in read_jsonl(out):
            if not isinstance(row, dict) or type(row.get('id')) not in (str, int) or not (
                    isinstance(row.get('prompt_hash'), str)):
                raise DataError(f'{line}: not a row that generate.py wrote: it must have an id and '
                                f'a prompt_hash; delete this line, and its prompt is answered '
                                f'again')
            done.add((row['id'], row['prompt_hash']))
    ownership.claim(out.parent, *names, *parts)
    ownership.write_text(out.with_name(names[1]), json.dumps(settings, indent=1) + '\n')
    return done


def to_row(answer, log_prob, per_token):
    """Return the entry of an answer in answers.jsonl; log_prob: by `confidences`, or None."""
    row = {'text': answer.text, 'reason': answer.reason, 'n_tokens': len(answer.tokens),
           'log_prob': sum(answer.log_probs), 'sample_log_prob': sum(answer.sample_log_probs),
           'entropy': sum(answer.entropies) / len(answer.tokens)}
    if log_prob is not None:
        row |= {'scored_log_prob': log_prob, 'confidence': math.exp(min(0, log_prob))}
    keys = ('tokens', 'log_probs', 'sample_log_probs', 'entropies') if per_token else ()
    return row | {key: getattr(answer, key) for key in keys}
