"""Tools in a row of data: what a model can call, and its calls."""

import json

from data.files import has_fields, is_empty
from runtime.errors import DataError


def split_row(row):
    """Return (a row without its tools, the tools as JSON schemas or None); raises DataError."""
    name = next((name for name in ('tools', 'functions') if not is_empty(row.get(name))), None)
    tools = [_value(tool, f'a tool in "{name}"') for tool in _list(row[name], f'"{name}"')]
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"{name}" must be a list of JSON schemas, not {row[name]!r:.60}')
    if name == 'functions':
        tools = [{'type': 'function', 'function': tool} for tool in tools]
    return {key: value for key, value in row.items() if key != name}, tools or None


def read_calls(calls):
    """Return the tool calls of a turn, their arguments as objects; raises DataError."""
    read = []
    for call in _list(calls, '"tool_calls"'):
        call = _value(call, 'a tool call')
        function = call.get('function', call) if isinstance(call, dict) else None
        if not has_fields(function, 'name', 'arguments'):
            raise DataError(f'a tool call must have a name and arguments, got {call!r:.60}')
        function = {'name': function['name'],
                    'arguments': _value(function['arguments'], 'the arguments')}
        kept = {key: call[key] for key in ('id',) if key in call}
        read.append({'type': 'function', 'function': function} | kept)
    return read


def _list(value, what):
    """Return a list, also one that is written as JSON, or one object in a list."""
    value = _value(value, what)
    return value if isinstance(value, list) else [value]


def _value(value, what):
    """Return a value, read from JSON if it is a text; raises DataError."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f'{what} is no JSON: {value!r:.60}') from error
