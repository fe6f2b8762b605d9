"""The services of `--tracker`, which get the record of each training step as well."""

import atexit
import importlib
from dataclasses import asdict
from pathlib import Path


def start(cfg):
    """Return a function that sends a record of log.jsonl to the service `cfg.tracker`."""
    if cfg.tracker == 'tensorboard':
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(Path(cfg.out_dir) / 'runs')
        atexit.register(writer.close)   # it writes every two minutes, and not by itself at the end
        return lambda record: [writer.add_scalar(key, value, record['step'])
                               for key, value in record.items()]
    tracker = importlib.import_module(cfg.tracker)      # trackio has the functions of wandb
    more = {'dir': cfg.out_dir} if cfg.tracker == 'wandb' else {}
    run = tracker.init(project='nanocal', name=Path(cfg.out_dir).name, config=asdict(cfg), **more)
    atexit.register(tracker.finish)     # a thread sends the records
    return lambda record: run.log(record, step=record['step'])
