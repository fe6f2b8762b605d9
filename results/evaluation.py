"""From the samples of an evaluation to the files in its folder: metrics, tables, pictures, page."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from results import confidence, page, report
from runtime import device


def write_evaluation(results, earlier, samples, tasks, cfg, identity, out_dir):
    """Measure `samples`, {task: its samples}; write results.json, .md, .csv, .tex, report.html and
    reliability diagrams to `out_dir`; return the content of results.json.

    results: {task: result without metrics} of this evaluation; the metrics are added in place
    earlier: {task: result} of results.json; measured again if the code of the metrics has changed
    tasks:   {task: its Task}, those of data/tasks.py
    cfg:     the EvalConfig; identity: hashes of the model and the tokenizer
    """
    earlier = report.measure_again({
        task: result for task, result in earlier.items()
        if task not in results and not is_of_other_answers(task, result, results, samples)},
        samples)
    with ThreadPoolExecutor(1) as pool:     # pictures are drawn while the workers compute
        drawn = cfg.pictures and pool.submit(report.draw_diagrams, earlier, results, samples, tasks,
                                             out_dir)
        for task, result in results.items():
            rows, free = samples[task], tasks[task.partition('.')[0]].kind == 'free'
            result |= report.summarize(rows, cfg.norm, n_bootstrap=cfg.n_bootstrap, seed=cfg.seed,
                                       fit=cfg.fit_temperature or free and len(rows) > 1)
            shots = result.get('shots', 0)
            result['fewer_shots'] = sum(s.get('shots', shots) < shots for s in rows)
            if free:
                result |= confidence.facts(task, samples)
    content = {'schema': report.SCHEMA, 'config': asdict(cfg) | {'model': str(cfg.model)},
               'seed': cfg.seed, 'versions': device.versions(cfg.device), 'identity': identity,
               'tasks': earlier | results}
    to_read, pictures = page.to_read(content['tasks'], samples), drawn.result() if drawn else []
    page.write_report(content, to_read, pictures, out_dir)
    report.write_results(content, out_dir, page.mistakes(to_read))
    if pictures:
        print(f'wrote {", ".join(pictures)} to {out_dir}')
    return content


def is_of_other_answers(task, result, results, samples):
    """Return whether `result` is that of a confidence in answers that have changed since."""
    parent = task.partition('.')[0]
    if parent not in results or 'answers' not in result or (
            result['answers'] == confidence.digest_of_answers(samples[parent])):
        return False
    print(f'{task}: left out, since the answers to {parent} have changed; evaluate it again')
    return True
