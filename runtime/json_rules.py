"""Read a JSON object, and check its values against rules.

A rule lists the allowed values of a key, as alternatives: (lowest, highest) of integers or, if
these are floats, of any numbers; a type; [alternatives for the items of a list]; or a value.
"""

import json

from runtime.errors import CheckpointError


def read_json_object(path, error=CheckpointError):
    """Return the object in a JSON file of any origin; raise `error` for any other content."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as reason:
        raise error(f'{path}: not valid JSON: {reason}') from reason
    if not isinstance(content, dict):
        raise error(f'{path}: not a JSON object')
    return content


def each(rules: dict) -> dict:
    """Return {key: rule} for each key in {'several keys': rule}."""
    return {key: rule for keys, rule in rules.items() for key in keys.split()}


def check_values(values, rules, where, block='', required=()):
    """Raise CheckpointError for a missing or wrong value and, inside a `block`, an unknown key.

    required: the keys that may not be missing; None: those that may not be null
    """
    for key in values if block else ():
        if key not in rules:
            raise CheckpointError(f'{where}: {block}{key} is not supported; the keys are '
                                  f'{", ".join(rules)}')
    for key, rule in rules.items():
        if key not in values:
            if None not in rule if required is None else key in required:
                raise CheckpointError(f'{where}: {block}{key} is missing; it must be '
                                      f'{_describe(rule)}')
        elif not _fits(values[key], rule):
            raise CheckpointError(f'{where}: {block}{key} = {values[key]!r:.60} is not supported; '
                                  f'it must be {_describe(rule)}')


def _fits(value, rule):
    for option in rule:
        if type(option) is tuple:
            low, high = option
            if type(value) in (int, type(low)) and low <= value <= high:
                return True
        elif type(option) is list:
            if type(value) is list and value and all(_fits(x, option) for x in value):
                return True
        elif option is type(value) or type(value) is type(option) and value == option:
            return True
    return False


def _describe(rule):
    names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'true or false',
             dict: 'an object'}

    def text(option):
        match option:
            case tuple((low, high)):
                return f'{names[type(low)]} from {low} to {high}'
            case list():
                return f'a list, each item {_describe(option)}'
        return names.get(option) or json.dumps(option)
    return ' or '.join(map(text, rule))
