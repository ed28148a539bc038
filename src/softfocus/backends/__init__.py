"""One module or package a backend, with what ``contract.Backend`` says. None imports another, nor
the reference.

Nothing outside ``dispatch`` and ``ops`` reaches in, but for the lab, which has ``cpu.build``
compile and say how it stands.
"""
