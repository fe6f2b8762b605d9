"""Read the prompts of a file that generate.py answers."""

from data.chat import encode_prompt
from data.files import dialogue, parsed, read_rows
from data.messages import read_turns, take_tools, with_context, without_nulls
from runtime.errors import DataError


def read_prompts(path, tokenizer, template, add_bos):
    """Return ([(row, token ids)], the ids that end an answer) of a file with prompts to answer, in
    plain text for the template ''. Raises DataError with file and line."""
    prompts = []
    stop = {*tokenizer.end_ids}
    places = {}

    def parse(row, place):
        given, tools = take_tools(without_nulls(row))
        if ('prompt' in given) == ('messages' in given) or 'answers' in given:
            raise DataError(f'fields {", ".join(row) or "(none)"}; wanted either "prompt" or '
                            f'"messages", and no "answers"')
        id = given.get('id', str(len(prompts)))
        if type(id) not in (str, int):
            raise DataError(f'the id {id!r} is neither text nor a whole number')
        if places.setdefault(id, place) != place:
            raise DataError(f'the id {id!r} is already at {places[id]}')
        name = 'messages' if 'messages' in given else 'prompt'
        turns = (read_turns(given[name], f'"{name}"', 'user') if template or name == 'messages'
                 else dialogue(given[name]))    # a plain text is encoded as it is
        messages = with_context(given, turns)
        if (role := messages[-1]['role'] if messages else None) != 'user':
            raise DataError(f"the last message must have the role 'user', not {role!r}")
        if not template and ('messages' in given or len(messages) > 1 or tools):
            raise DataError('"messages", a system message, tools and a history need a template: '
                            'leave out --raw')
        return row | {'id': id}, *encode_prompt(messages, tokenizer, template, add_bos, tools)

    for place, row in read_rows(path):
        entry = parsed(place, row, parse, place)
        if isinstance(entry, DataError):
            raise entry
        prompts.append(entry[:2])
        stop |= entry[2]
    if not prompts:
        raise DataError(f'{path} has no rows')
    return prompts, stop
