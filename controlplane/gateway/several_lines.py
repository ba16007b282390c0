"""Headers that come in several lines, of requests and of replies."""

Line = tuple[bytes, bytes]


def join_lines(headers: dict[bytes, bytes], further: list[Line]) -> None:
    """Makes what is written as `name: value` all lines of that name. `headers` has the first of each,
    in lower case. All at once: to copy each with those before it would take seconds for a long head."""
    for name, values in by_name(headers, further):
        headers[name] = lines_of(name, values)


def by_name(headers: dict[bytes, bytes], further: list[Line]) -> list[tuple[bytes, list[bytes]]]:
    """The values of each name in `further`, from the first line on."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in further:
        if name not in found:
            found[name] = [headers[name]]
        found[name].append(value)
    return list(found.items())


def lines_of(name: bytes, values: list[bytes]) -> bytes:
    return (b"\r\n%b: " % name).join(values)


def tokens(value: bytes) -> list[bytes]:
    """Of a list in a header, in lower case."""
    return [token for part in value.lower().split(b",") if (token := part.strip())]
