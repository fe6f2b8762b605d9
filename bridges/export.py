"""Make the tokenizer files that other programs read: tokenizer.json, chat template, stop tokens."""

import json
from pathlib import Path

from data.chat import chat_of, encode_answer
from data.tokenizer import LibraryTokenizer, generation_ends, read_beside, settings_beside
from runtime import rooms


def tokenizer_files(folder, tokenizer, template=None, add_bos=True, reward=False):
    """Return {name: text, or object for a JSON file} to add to the base model's files, or replace.

    folder:   the folder of the base model; DataError if a JSON file in it is damaged
    template: name of the chat template used in training; None keeps the base model's
    reward:   whether for a reward model, which has the pad token of `pad_token`
    """
    files, settings = {}, read_beside(folder, 'tokenizer_config.json')
    # without more packages transformers reads no other file of a tokenizer
    if not any((Path(folder) / name).exists() for name in ('tokenizer.json', 'vocab.json')):
        if isinstance(tokenizer, LibraryTokenizer):
            content = json.loads(tokenizer.library.to_str())
        else:
            content = rooms.load('sentence pieces').sentencepiece_json(tokenizer)
        if content is None:
            print('note: this kind of sentencepiece model cannot be written as a tokenizer.json; '
                  'transformers needs the package protobuf to read its tokenizer.model')
        else:
            files['tokenizer.json'] = content
            names = {key: tokenizer.decode([i]) for key, i in (
                ('bos_token', tokenizer.bos_id), ('eos_token', tokenizer.eos_id)) if i is not None}
            settings |= {'tokenizer_class': 'PreTrainedTokenizerFast', **names,
                         'clean_up_tokenization_spaces': False,
                         'add_prefix_space': tokenizer.leads_with_space}    # for llama.cpp
    if template:
        settings.pop('chat_template', None)     # older programs prefer it to the file
        files['chat_template.jinja'] = saved_template(template, tokenizer, add_bos, reward)
        # transformers ends an answer at these alone
        stops = generation_ends(folder) or [tokenizer.eos_id]
        ends = chat_of(tokenizer, template, add_bos).end_ids
        if missing := sorted(ends - {*stops}):
            files['generation_config.json'] = read_beside(folder, 'generation_config.json') | {
                'eos_token_id': [*stops, *missing]}
    pad = pad_token(folder, tokenizer, template)[0] if reward else None
    if pad:
        names = read_beside(folder, 'special_tokens_map.json')  # which beats tokenizer_config.json
        settings['pad_token'] = pad
        if names and names.get('pad_token') != pad:
            files['special_tokens_map.json'] = names | {'pad_token': pad}
    if settings != read_beside(folder, 'tokenizer_config.json'):
        files['tokenizer_config.json'] = settings
    return files


def saved_template(template, tokenizer, add_bos, reward=False):
    """Return the Jinja source of a template for other programs, with the names that it uses.

    reward: for a reward model, which reads the token that ends the last answer: no line break after
    """
    chat = chat_of(tokenizer, template, add_bos)
    names = {name: value for name, value in chat.names.items()
             if template != 'model' or value != tokenizer.special_names.get(name)}
    lines = [f'{{%- set {name} = {json.dumps(value)} %}}\n' for name, value in names.items()]
    source = ''.join([*lines, chat.sources[0]])
    return source if not reward else (
        f'{{%- set chat %}}\n{source}{{%- endset %}}\n'
        f'{{{{- chat if add_generation_prompt else chat.rstrip() }}}}\n')


def pad_token(folder, tokenizer, template):
    """Return (name, id) of a token that can pad answers in `template`; (None, None) without one.

    transformers reads a reward at the last token that is not the pad token, so it must not end an
    answer. The base model's own is preferred; then one that is named so; the unknown token; the
    last control token that the template does not use; any other.
    """
    ids, unknown = dict(tokenizer.control_ids), None
    if model := getattr(tokenizer, 'model', None):      # of sentencepiece
        unknown = model.id_to_piece(model.unk_id())
        ids.setdefault(unknown, model.unk_id())
    own = [settings_beside(folder).get('pad_token')]
    if Path(folder, 'tokenizer.json').exists():     # its names can differ from tokenizer.model's
        ids = {token['content']: token['id']
               for token in read_beside(folder, 'tokenizer.json').get('added_tokens') or ()
               if (token.get('special') or token['content'] in own)
               and token['id'] < tokenizer.n_vocab}
    prompt, answer = encode_answer([{'role': 'user', 'content': 'user'}], 'assistant', tokenizer,
                                   template, add_bos=False)
    *used, end = *prompt, *answer
    used = {*used, tokenizer.bos_id, tokenizer.eos_id}
    config_id = read_beside(folder, 'config.json').get('pad_token_id')
    name = min((name for name in ids if ids[name] != end), default=None, key=lambda name: (
        name not in own, ids[name] != config_id, 'pad' not in name.lower(), name != unknown,
        ids[name] in used, -ids[name]))
    return name, ids.get(name)
