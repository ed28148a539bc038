"""The backends: each module or package implements ``contract.Backend``.

Only ``checked`` imports others. None imports the reference. Only ``dispatch`` and ``ops`` import
them, and the lab, which calls ``cpu.build`` to compile the kernels and to report their state.
"""
