"""One module a backend; none imports another, and nothing outside ``dispatch`` and ``ops`` reaches in.

A backend module has ``supports(call) -> str | None`` (None, or the sentence that says why not), ``forward`` and
``backward`` with the arguments of ``softfocus.ops``.
"""
