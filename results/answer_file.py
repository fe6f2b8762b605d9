"""The file of generate.py, one line per prompt: open it for more answers, and write a row."""

import glob
import math
from pathlib import Path

from results.samples import claim_lines, merge_parts, open_lines, read_jsonl
from runtime import ownership
from runtime.errors import ConfigError, DataError

OTHERS = 'log.jsonl', 'samples.jsonl'       # they grow; see train.py and evaluate.py


def open_answers(cfg, settings, processes):
    """Prepare the file `out`; return {(id, hash of the prompt)} of the rows in it.

    The settings are in a file beside it: answers.config.json for answers.jsonl. Raises ConfigError
    as `samples.open_lines` does. The caller holds the lock of its folder.
    """
    out, done = Path(cfg.out), set()
    config, advice = f'{out.stem}.config.json', 'choose another --out, or --overwrite'
    names, listed = (out.name, config), ownership.written_files(out.parent)
    if out.name in OTHERS or (out.name in listed) != (config in listed):
        raise ConfigError(f'{out} has the name of a file that another script writes, and is not '
                          f'replaced; choose another --out, such as answers.jsonl')
    open_lines(out, config, settings, names, 'answers', advice, [], processes,
               (out.name, [*map(glob.escape, names)]) if cfg.overwrite else None)
    merge_parts(out)
    for line, row in read_jsonl(out) if out.exists() else ():
        if not isinstance(row, dict) or type(row.get('id')) not in (str, int) or not (
                isinstance(row.get('prompt_hash'), str)):
            raise DataError(f'{line}: not a row that generate.py wrote: it must have an id and a '
                            f'prompt_hash; delete this line, and its prompt is answered again')
        done.add((row['id'], row['prompt_hash']))
    claim_lines(out, config, settings, names, processes)
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
