"""Chat templates: Jinja sources, rendered as transformers renders them.

`model` is that of the tokenizer's files. The others, in data/chat_templates/, are for base models,
and have {% generation %} around what is supervised.
"""

import functools
import json
import re
from datetime import datetime
from pathlib import Path

from runtime.errors import ConfigError, DataError

FOLDER = Path(__file__).parent / 'chat_templates'
TEMPLATES = tuple(sorted(path.stem for path in FOLDER.glob('*.jinja')))
# noncharacters of Unicode, which no text has: around what a {% generation %} block renders, and in
# place of a question
BEGIN, END = '\ufdd1', '\ufdd2'
QUESTION = '\ufdd4'


def template_source(name, tokenizer, with_tools=False):
    """Return the Jinja source of a template; raises ConfigError if the tokenizer cannot have it."""
    if name == 'model':
        sources = tokenizer.chat_templates
        if not sources:
            raise ConfigError(f"the tokenizer of this model brings no chat template; use one of "
                              f"{', '.join(TEMPLATES)}, such as 'tulu'")
        return sources.get('tool_use' if with_tools else 'default') or sources.get(
            'default') or next(iter(sources.values()))
    if missing := missing_tokens(name, tokenizer):
        raise ConfigError(f'the template needs {", ".join(missing)}, which the tokenizer of the '
                          f'model lacks, or has with "special": false in tokenizer.json; '
                          f"'tulu' works with every tokenizer, and 'mistral_v1' has [INST] as text")
    return _source(name)


def _source(name):
    return (FOLDER / f'{name}.jinja').read_text(encoding='utf-8')


def missing_tokens(name, tokenizer):
    """Return the control tokens that a template of ours names in its first line and that a
    tokenizer lacks.
    """
    needed = re.match(r'(?:{#- needs (.*?) -?#})?', _source(name))[1] or ''
    return [token for token in needed.split() if token not in tokenizer.control_ids]


def template_names(name, tokenizer, add_bos):
    """Return {variable: name of a token} for a template; without BOS if add_bos is False."""
    if name == 'model':
        names = dict(tokenizer.special_names)
        return names | {'bos_token': ''} if tokenizer.bos_id is not None and not add_bos else names
    return {'bos_token': tokenizer.decode([tokenizer.bos_id]) if add_bos else '',
            'eos_token': tokenizer.decode([tokenizer.eos_id])}


@functools.lru_cache(16)
def compile_template(source):
    """Return the jinja2.Template of a source; raises DataError for one that is not Jinja."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} around what the assistant says."""
        tags = frozenset({'generation'})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method('mark'), [], [], body).set_lineno(line)

        def mark(self, caller):
            return BEGIN + caller() + END

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols'])
    environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {'raise_exception': raise_exception,
                            'strftime_now': lambda form: datetime.now().strftime(form)}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f'the chat template of the model is no Jinja: {error}') from error


def render(source, messages, **variables):
    """Return the text of a conversation; raises DataError for one that the template refuses."""
    try:
        return compile_template(source).render(messages=messages, **variables)
    except DataError:
        raise
    except Exception as error:      # a template can raise anything
        raise DataError(f'the chat template refuses the conversation: {error}') from error


def without(characters, text):
    return text.translate(dict.fromkeys(map(ord, characters)))


def trained_only(text, messages):
    """Return a text without the marks around those answers that are not trained."""
    trained = [message.get('train', True) for message in messages if message['role'] == 'assistant']
    before, *answers = text.split(BEGIN)
    if all(trained):
        return text
    if len(answers) != len(trained):
        raise DataError('this chat template marks parts of answers, so single answers cannot be '
                        'left untrained')
    return before + ''.join(BEGIN + answer if train else answer.replace(END, '')
                            for answer, train in zip(answers, trained, strict=True))
