"""Tables of cells, header first, as Markdown."""


def markdown(lines):
    """Return lines of cells as a Markdown table."""
    texts = ['| ' + ' | '.join(' '.join(cell.replace('|', '\\|').splitlines()) for cell in line)
             + ' |' for line in lines]
    return '\n'.join([texts[0], '|' + '---|' * len(lines[0]), *texts[1:]]) + '\n'
