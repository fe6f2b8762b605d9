"""Small faults in the product's code, and which tests notice them.

    python tests/mutants.py                        # all, into tests/mutants.csv
    python tests/mutants.py --only=metrics.py,draw # those whose file or name holds a text
    python tests/mutants.py --check                # only whether each text is found once

Each mutant replaces one text of one file in a copy of the repository and runs the tests of its room
until one fails. A mutant that no test notices has an empty cell in mutants.csv: it needs a test.
"""

import argparse
import csv
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

# (name, file, text, replacement, test files); the text occurs once in the file
MUTANTS = [
    # metrics, statistics
    ('gap has its sign', 'metrics.py', 'mean_confidence(probs, labels) - accuracy(probs, labels)',
     'accuracy(probs, labels) - mean_confidence(probs, labels)', 'metrics'),
    ('nll without its floor', 'metrics.py',
     'np.log(np.maximum(probs[rows, labels].astype(np.float64), NLL_FLOOR))',
     'np.log(probs[rows, labels].astype(np.float64) + 1e-9)', 'metrics'),
    ('entropy in nats', 'metrics.py', "(np.log(2) if unit == 'bits' else 1)", '1', 'metrics'),
    ('remainder of rmsce in a bin of its own', 'metrics.py',
     'n_bins = max(1, len(confidence) // bin_size)',
     'n_bins = max(1, -(-len(confidence) // bin_size))', 'metrics'),
    ('sweep stops one bin late', 'metrics.py', '>= 0).all()', '> -0.02).all()', 'metrics'),
    ('debiased ece divides by n', 'metrics.py', 'np.maximum(count - 1, 1)', 'np.maximum(count, 1)',
     'metrics'),
    ('ks error splits ties', 'metrics.py', 'np.abs(sums[tie_ends - 1]).max()',
     'np.abs(sums).max()', 'metrics'),
    ('resolution around 0', 'metrics.py', "share * (acc - mean) ** 2", "share * acc ** 2",
     'metrics'),
    ('triweight kernel squared', 'metrics.py', '0, None) ** 3, end_weight=2)',
     '0, None) ** 2, end_weight=2)', 'metrics'),
    ('clustered intervals ignore groups', 'stats.py',
     'float(min(1, 2 * (1 + rarer) / (1 + len(values))))',
     'float(min(1, 2 * rarer / len(values)))', 'stats,compare'),
    ('bca without acceleration', 'stats.py', 'bias + x / max(1 - acceleration * x, 1e-3)',
     'bias + x', 'stats'),
    ('one tail of an interval', 'stats.py', 'return (1 - level) / 2, (1 + level) / 2',
     'return 1 - level, level', 'stats'),

    # loss
    ('softcap has no derivative', 'fused_ce.py', 'g *= z.div_(softcap).square_().neg_().add_(1)',
     'pass', 'fused_ce'),
    ('coefficient f is added', 'fused_ce.py', 'g.scatter_(1, label, g.gather(1, label) - f)',
     'g.scatter_(1, label, g.gather(1, label) + f)', 'fused_ce'),
    ('dW of the last chunk alone', 'fused_ce.py', 'dw, add=chunk.start > 0)', 'dw)', 'fused_ce'),
    ('ignored tokens count in the mean', 'fused_ce.py',
     '_divisor(n if num_items is None else num_items)',
     '_divisor(len(supervised) if num_items is None else num_items)', 'fused_ce'),
    ('groups cut at chunks', 'fused_ce.py', 'borders[bisect.bisect(borders, end + rows) - 1]',
     'min(n, end + rows)', 'fused_ce,joint_loss'),
    ('second backward without upstream', 'fused_ce.py', 'factor * ctx.scale, ctx.needs',
     'ctx.scale, ctx.needs', 'fused_ce'),
    ('confidence penalty rewards', 'fused_ce.py',
     "return Loss(lambda s: -w * s.entropy, lambda s: {'a': w * s.entropy, 'b': w},",
     "return Loss(lambda s: w * s.entropy, lambda s: {'a': w * s.entropy, 'b': w},", 'fused_ce'),

    # model, attention, decoding
    ('gemma norm without 1 +', 'model.py', 'y, w.shape[-1:], 1 + w, eps)',
     'y, w.shape[-1:], w, eps)',
     'model,families'),
    ('rotation the other way', 'model.py', 'a * cos - b * sin, b * cos + a * sin',
     'a * cos + b * sin, b * cos - a * sin', 'model,families'),
    ('llama3 rope blends the wrong ends', 'model.py',
     'return keep * frequency + (1 - keep) * frequency / rope.factor',
     'return (1 - keep) * frequency + keep * frequency / rope.factor', 'families,configs'),
    ('residual scale on attention alone', 'model.py',
     'return x + self.scaled(self.post_feedforward_layernorm(y))',
     'return x + self.post_feedforward_layernorm(y)', 'families'),
    ('temperature of a reward model', 'model.py',
     'return 1 if self.config.reward else self.config.temperature / self.config.logit_scale',
     'return self.config.temperature', 'families,model'),
    ('lora scale inverted', 'model.py', 'self.scale = alpha / rank', 'self.scale = rank / alpha',
     'adapters,model'),
    ('bfloat16 residual stream', 'model.py', 'self.project_in(self.embed_tokens(tokens)).float()',
     'self.project_in(self.embed_tokens(tokens))', 'model,one_decoder,families'),
    ('window one token wider', 'attention.py',
     'visible & (i_position - j_position < window)',
     'visible & (i_position - j_position <= window)', 'model,families,one_decoder'),
    ('softcap after the mask', 'attention.py',
     '(q @ k.mT).float() * scale / softcap)', '(q @ k.mT).float() / softcap)', 'families,model'),
    ('blocks seen too few', 'attention.py', 'seen = (end.amax(-1) > first) & (key < first + M)',
     'seen = (end.amin(-1) > first) & (key < first + M)', 'kernels,one_decoder,fused_ce'),
    ('cache forgets the window', 'decoding/cache.py',
     'cached[slots, :, self.positions % cache.size] = new[:, :, 0]',
     'cached[slots, :, self.positions.clamp(max=cache.size - 1)] = new[:, :, 0]', 'generate'),
    ('decode sees one key less', 'decoding/cache.py',
     'return (position >= 0) & attention', 'return (position > 0) & attention',
     'generate'),
    ('top_p keeps one token less', 'decoding/draw.py', '(probs.cumsum(-1) - probs < s.top_p)',
     '(probs.cumsum(-1) < s.top_p)', 'generate'),
    ('entropy of q instead of p', 'decoding/draw.py', 'entropy = -(log_p.exp() * log_p).sum(-1)',
     'entropy = -(log_p.exp() * log_p).sum(-1) / max(s.temperature, 1e-3)', 'generate'),
    ('padded vocabulary may be drawn', 'decoding/draw.py',
     "    z = logits[:, :n_vocab]\n", "    z = logits\n", 'generate'),
    ('answers share random numbers', 'decoding/draw.py', 'counter=[0, 0, 0, number]',
     'counter=[0, 0, 0, 0]', 'generate'),
    ('end token stays in the text', 'generate.py', "n_end = answer.reason == 'end'", 'n_end = 0',
     'generate'),
    ('the later stop string', 'generate.py',
     "return min((at for string in stop if (at := text.find(string)) >= 0), default=-1)",
     "return max((at for string in stop if (at := text.find(string)) >= 0), default=-1)",
     'generate'),
    ('an answer cut by the context is max_tokens', 'generate.py',
     "return 'max_tokens' if answer.limit == s.max_tokens else 'context'",
     "return 'max_tokens'", 'generate'),
    ('T5 buckets saturate late', 'families/t5.py', 'large.clamp_max(n - 1)', 'large', 't5'),

    # optimizer
    ('decay ignores lr', 'runtime/optim.py', "1 - lr * group['weight_decay']",
     "1 - group['weight_decay']", 'optim'),
    ('no bias correction of v', 'runtime/optim.py', '1 / math.sqrt(1 - beta2 ** self.steps)', '1.0',
     'optim'),
    ('master truncated', 'runtime/optim.py', 'high = (bits + 0x8000) >> 16', 'high = bits >> 16',
     'optim'),
    ('stochastic rounding down', 'runtime/optim.py', '(noise & 0xffff)) & -0x10000',
     '0) & -0x10000', 'optim'),
    ('micro-batches summed in bfloat16', 'runtime/optim.py', 'self.summing = micro_batches > 1',
     'self.summing = False', 'optim,train'),

    # training
    ('cosine to -1', 'train.py', '(1 + math.cos(math.pi * done)) / 2', 'math.cos(math.pi * done)',
     'train'),
    ('warm-up starts at 0', 'train.py', 'return cfg.lr * (step + 1) / warmup',
     'return cfg.lr * step / warmup', 'train'),
    ('validation on training data', 'train.py', 'training = np.sort(rest[:cfg.data_limit])',
     'training = np.sort(order[:cfg.data_limit])', 'train'),
    ('clipping raises small gradients', 'train.py', '(limit / (norm + 1e-6)).clamp(max=1.0)',
     '(limit / (norm + 1e-6))', 'train'),
    ('loss is that of the whole batch twice', 'train.py', "mean = ({'num_items': n_targets}",
     "mean = ({'num_items': n_targets + 1}", 'train'),
    ('mean of sequences counts tokens', 'data/packing.py',
     '1 / (count[owner] * np.count_nonzero(count))', '1 / count.sum()', 'train,data'),
    ('epochs in the same order', 'data/packing.py', 'default_rng([seed, epoch])',
     'default_rng([seed, 0])', 'train,data'),
    ('resume forgets the data', 'runtime/resume.py',
     "if key not in free_keys and getattr(cfg, key, value) != value and not chosen",
     "if False and getattr(cfg, key, value) != value and not chosen", 'resume'),
    ('a loss of NaN is saved', 'runtime/log.py',
     "not (math.isfinite(values['loss']) and math.isfinite(values['grad_norm']))", 'False',
     'train,resume'),
    ('rows that do not divide the work', 'runtime/memory.py',
     'if cost(rows) <= 1.03 * least)', 'if cost(rows) <= 3 * least)', 'memory'),

    # alignment
    ('ipo without its half', 'align.py', '(pairs.margin(cfg) - 1 / (2 * cfg.beta)).square()',
     '(pairs.margin(cfg) - 1 / cfg.beta).square()', 'align'),
    ('label noise ignored', 'align.py', 'return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)',
     'return -F.logsigmoid(x)', 'align'),
    ('simpo sums', 'align.py', '(pairs.s_w / pairs.n_w - pairs.s_l / pairs.n_l) - cfg.gamma',
     '(pairs.s_w - pairs.s_l) - cfg.gamma', 'align'),
    ('margin of a reward pair ignored', 'align.py',
     'return r_w - r_l, r_w + r_l, weight', 'return r_w - r_l + 1, r_w + r_l, weight', 'align'),
    ('rlcr is linear', 'alignment/rewards.py', '(correct - float(form[2])) ** 2',
     'abs(correct - float(form[2]))',
     'align_rl'),
    ('resampling never', 'alignment/rollouts.py',
     'np.flatnonzero(rewards.max(1) == rewards.min(1))',
     'np.flatnonzero(rewards.max(1) < rewards.min(1))', 'align_rl'),
    ('penalty of cut answers ignored', 'alignment/rollouts.py', 'rewards[cut] = cfg.penalty',
     'pass', 'align_rl'),
    ('reference with adapters', 'alignment/rollouts.py', 'layer.scale = 0.0', 'pass', 'align_rl'),
    ('kl controller backward', 'alignment/rollouts.py', 'model.kl_coef *= 1 + np.clip(',
     'model.kl_coef *= 1 - np.clip(',
     'align_rl'),
    ('value loss without its weight', 'alignment/objectives.py',
     "loss = loss + cfg.value_coef * (errors * columns['weight']).sum()",
     "loss = loss + (errors * columns['weight']).sum()", 'align_rl'),
    ('returns without values', 'alignment/rollouts.py',
     'return whitened(advantage, parts), advantage + value',
     'return whitened(advantage, parts), advantage',
     'align_rl'),

    # data
    ('packed neighbors see each other', 'data/packing.py', 'self.ends += [end] * len(ids)',
     'self.ends += [end + 1] * len(ids)', 'scoring,evaluate,questions'),
    ('tokens in padding', 'data/packing.py',
     'arrays[2, n:] = np.arange(n + 1, length + 1)', 'arrays[2, n:] = 0', 'evaluate,scoring,data'),
    ('rows cut one token early', 'data/packing.py', '_round_up(last + 1, trim)',
     '_round_up(last, trim)', 'evaluate'),
    ('t5 prompts without their end', 'data/packing.py', '(*option[:at], eos)', '(*option[:at],)',
     't5'),
    ('a dropped shot is counted', 'data/trees.py', 'for ids in prompts], starts, shots=n)',
     'for ids in prompts], starts, shots=0)', 'scoring,evaluate,questions'),
    ('chat options keep white space', 'data/trees.py', 'self.lead + option.strip()',
     'self.lead + option', 'scoring,evaluate,questions'),
    ('only the first option sets max_length', 'data/trees.py',
     'longest = len(before) + max(map(len, prompts))', 'longest = len(before) + len(prompts[0])',
     'scoring,evaluate,questions'),
    ('answers without their mask are kept', 'data/instruct.py',
     'if not any(loss_mask[:max_length]):',
     'if False:', 'data'),
    ('per-turn weights ignored', 'data/chat.py',
     "return message['role'] == 'assistant' and (message.get('train', True) or None)",
     "return message['role'] == 'assistant'", 'data'),
    ('late system messages', 'data/chat.py',
     "if message['role'] == 'system' and message is not messages[0]:", 'if False:', 'data'),
    ('null columns are values', 'data/messages.py',
     'for name, value in row.items() if value is not None}', 'for name, value in row.items()}',
     'data,preferences'),
    ('pairs swapped by score', 'data/preferences.py',
     'if before and chosen[0]', 'if False and chosen[0]', 'preferences,align'),
    ('equal scores are a pair', 'data/preferences.py',
     'if len({score for score, _, _ in encoded}) < 2:', 'if False:', 'preferences,align'),
    ('cyclic orders shift back', 'data/questions.py', '(i + shift) % n_options',
     '(i - shift) % n_options', 'questions,evaluate'),
    ('numeric labels from 0', 'data/questions.py',
     'if type(index) is int and 0 <= index < len(labels):',
     'if type(index) is int and 0 < index < len(labels):', 'questions'),
    ('N/A options of prox', 'data/benchmarks.py', "not (pads and option == 'N/A')", "True",
     'questions'),
    ('header native everywhere', 'data/prompts.py',
     "prompt_format != 'mmlu' or benchmark.native is None",
     "benchmark.native is None", 'questions,evaluate'),
    ('caches with an empty file', 'data/cache.py', 'return len(self.offsets) - 1',
     'return len(self.offsets)', 'data'),

    # evaluation
    ('log-probability before the softcap', 'scoring.py',
     'logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)',
     'pass', 'scoring,evaluate'),
    ('entropy and top swapped', 'scoring.py', 's.top_logit - s.lse, s.entropy], 1)',
     's.entropy, s.top_logit - s.lse], 1)', 'scoring,evaluate'),
    ('validation questions in the result', 'results/report.py',
     'if held_out is not None:', 'if False:', 'report,evaluate,temperatures'),
    ('length normalization off', 'results/prediction_files.py',
     "return [*n_tokens] if norm == 'token' else [1] * len(n_tokens)", 'return [1] * len(n_tokens)',
     'prediction_files,report,compare,page'),
    ('characters for bytes', 'results/prediction_files.py',
     "len(text if norm == 'char' else text.encode())", "len(text)",
     'prediction_files,report,compare'),
    ('last sample of a text lost', 'results/samples.py',
     "if len(groups[key]) == sample.get('of', 1)", 'if len(groups[key]) > 0', 'evaluate'),
    ('orders averaged as logs', 'data/tasks.py',
     'np.logaddexp.reduce(total) - np.log(len(orders))', 'np.logaddexp.reduce(total)',
     'evaluate,report'),
    ('chance report above chance', 'results/report.py',
     "result['pooled']['accuracy_low'] <= chance", "result['pooled']['accuracy_low'] > chance",
     'report,evaluate'),
    ('one seed has an interval', 'results/over_seeds.py',
     'return stats.mean_interval(values) if len(values) > 2',
     'return stats.mean_interval(values) if len(values) > 1',
     'compare,report'),

    # written answers
    ('agreement of all answers', 'results/confidence.py',
     'return count / len(answers), answers[top]',
     'return 1.0, answers[top]', 'grading,confidence,written_answers'),
    ('confidences above 1', 'results/confidence.py', 'return value if 0 <= value <= 1 else None',
     'return value', 'grading,confidence,written_answers'),
    ('geometric mean without its root', 'results/confidence.py',
     "_exp(answer['log_prob'] / answer['n_tokens'])", "_exp(answer['log_prob'])",
     'grading,confidence,written_answers'),
    ('the first number counts', 'data/grading.py',
     "return text[marks[-1].end():].partition", "return text[marks[0].end():].partition",
     'grading,confidence,written_answers'),
    ('shots are tested as well', 'data/written_answers.py', 'if task.test == task.shots:',
     'if False:',
     'grading,confidence,written_answers'),
    ('thoughts are answers', 'runtime/thinking.py', 'if not tags:', 'if True:',
     'written_answers,generate,grading'),
    ('the sandbox has no time limit', 'runtime/sandbox_child.py',
     "used.ru_utime + used.ru_stime > 0.8 * request['seconds']", 'False', 'sandbox'),

    # the infrastructure of a run
    ('NaN weights pass', 'runtime/checkpoint.py',
     'if (tensor.is_floating_point() and not tensor.isfinite().all()', 'if (False', 'checkpoint'),
    ('a shard that is not there', 'runtime/weights.py', 'if name not in here:', 'if False:',
     'checkpoint'),
    ('hash of a part of each tensor', 'runtime/weights.py', 'data[start:start + PIECE]',
     'data[start:start + 4096]', 'checkpoint,align,generate'),
    ('adapter of another rank', 'runtime/adapter.py',
     'if [B.shape[0], A.shape[1]] != weight or B.shape[1] != r or not r:', 'if False:', 'adapters'),
    ('B and A swapped', 'runtime/adapter.py', 'weight.float() + B @ A * change.scale',
     'weight.float() - B @ A * change.scale', 'adapters'),
    ('unknown adapter keys', 'runtime/adapter.py',
     "if key not in RULES.keys() | UNUSED and value not in (None, False, 0, '', [], {}):",
     'if False:', 'adapters'),
    ('ranges exclude their ends', 'runtime/config.py', 'not low <= value <= high',
     'not low < value < high', 'configs,train'),
    ('infinite numbers in a config', 'runtime/config.py',
     'if isinstance(value, float) and not math.isfinite(value):', 'if False:', 'configs'),
    ('rope of slow and fast', 'runtime/config_ropes.py', "if own['fast'] <= own['slow']:",
     'if False:',
     'configs,checkpoint'),
    ('windows of full layers', 'runtime/config_json.py',
     "Layer(window if kind == 'sliding_attention' else None", "Layer(window",
     'families,checkpoint,configs'),
    ('inputs are removed', 'runtime/ownership.py',
     'if os.path.realpath(folder / name) in _inputs:', 'if False:', 'resume,train,evaluate'),
    ('other files are set aside', 'runtime/ownership.py', 'if not is_in_place(file):', 'if False:',
     'resume,train,evaluate'),
    ('float32 is read as bfloat16', 'runtime/checkpoint.py', "elif dtype == 'float32':",
     "elif dtype == 'float64':", 'checkpoint,train'),
    ('processes all write', 'runtime/parallel.py',
     "return ownership.lock(folder) if rank() == 0 else contextlib.nullcontext()",
     "return contextlib.nullcontext()", 'several_processes,evaluate'),
]


def run_tests(tree, tests):
    """Run test files in `tree` until one fails; return its name, or '' if all pass."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.chdir(tree)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.path[:0] = [str(tree), str(tree / 'tests')]
        sys.path.remove(str(HERE / 'tests'))
        import pytest

        class FirstFailure:
            name = ''

            def pytest_runtest_logreport(self, report):
                if report.failed and not self.name:
                    self.name = report.nodeid

            def pytest_collectreport(self, report):
                if report.failed and not self.name:
                    self.name = report.nodeid or 'import'

        first = FirstFailure()
        code = pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist',
                            *(f'tests/test_{name}.py' for name in tests.split(','))], [first])
        os.write(write, (first.name or ('' if code == 0 else f'exit {code}')).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        name = file.read()
    os.waitpid(pid, 0)
    return name


def worker(tree, mutants, results):
    os.environ['TRITON_INTERPRET'] = '1'
    import numpy, torch, transformers    # noqa: E401, F401    once, before all forks
    torch.set_num_threads(1)
    while mutant := mutants.get():
        name, file, text, replacement, tests = mutant
        path = Path(tree, file)
        source = path.read_text()
        path.write_text(source.replace(text, replacement))
        try:
            killer = run_tests(Path(tree), tests)
        finally:
            path.write_text(source)
        results.put((name, file, killer))
    results.put(None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--only', default='', help='texts of names or files, with commas')
    parser.add_argument('--check', action='store_true', help='only find the texts')
    parser.add_argument('--out', default=str(HERE / 'tests' / 'mutants.csv'))
    parser.add_argument('--processes', type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if any(text in m[0] or text in m[1]
                                        for text in options.only.split(','))]
    missing = 0
    for name, file, text, *_ in chosen:
        n = (HERE / file).read_text().count(text) if (HERE / file).exists() else 0
        if n != 1:
            print(f'{name}: {file} holds the text {n} times: {text}')
            missing += 1
    if options.check or missing:
        print(f'{len(chosen)} mutants, {missing} without their text')
        sys.exit(bool(missing))
    mutants, results = multiprocessing.Queue(), multiprocessing.Queue()
    for mutant in (*chosen, *[None] * options.processes):     # None ends a worker
        mutants.put(mutant)
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for i in range(options.processes):
            tree = Path(folder, str(i), 'repository')
            shutil.copytree(HERE, tree, ignore=shutil.ignore_patterns(
                '__pycache__', 'out', '.mypy_cache', '.hypothesis'))
            if (HERE.parent / 'shared').exists():
                (tree.parent / 'shared').symlink_to((HERE.parent / 'shared').resolve())
            workers.append(multiprocessing.Process(target=worker, args=(tree, mutants, results)))
            workers[-1].start()
        killers, running = {}, len(workers)
        while running:
            if (result := results.get()) is None:
                running -= 1
                continue
            name, file, killer = result
            killers[name] = killer
            print(f'{len(killers)}/{len(chosen)} {name} ({file}): {killer or "NOT NOTICED"}',
                  flush=True)
            with open(options.out, 'w', newline='') as file:
                rows = csv.writer(file, lineterminator='\n')
                rows.writerow(('mutant', 'file', 'noticed by'))
                rows.writerows((m[0], m[1], killers[m[0]]) for m in chosen if m[0] in killers)
    print(f'{sum(map(bool, killers.values()))} of {len(chosen)} noticed')


if __name__ == '__main__':
    main()
