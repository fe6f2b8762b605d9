"""The file of answers that generate.py writes: who wrote it, and which rows it has."""

from pathlib import Path

from results.samples import (OUTPUTS, claim_lines, merge_parts, merged_names, open_lines,
                             read_jsonl, with_parts)
from runtime import ownership
from runtime.errors import ConfigError


def open_answers(cfg, settings, processes):
    """Prepare the file `out` of generate.py; return {(id, hash of the prompt)} of its rows."""
    out = Path(cfg.out)
    config, advice = f'{out.stem}.config.json', 'choose another --out, or --overwrite'
    names, listed = (out.name, config), ownership.written_files(out.parent)
    # log.jsonl and samples.jsonl grow; see train.py and evaluate.py
    if out.name in ('log.jsonl', OUTPUTS[0]) or (out.name in listed) != (config in listed):
        raise ConfigError(f'{out} has the name of a file that another script writes, and is not '
                          f'replaced; choose another --out, such as answers.jsonl')
    ownership.check_free(out.parent, *names)
    if cfg.overwrite:
        ownership.rename_old(*map(out.with_name, (*names, *merged_names(out))))
    open_lines(out.parent, names, settings, 'answers', advice, processes)
    done = {(row['id'], row['prompt_hash']) for _, row in read_jsonl(*with_parts(out))}
    merge_parts(out)
    claim_lines(out.parent, names, settings, processes)
    return done
