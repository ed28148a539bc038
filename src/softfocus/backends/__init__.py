"""One module or package a backend; none imports another, and nothing outside ``dispatch`` and ``ops`` reaches in
(but for the lab, which has ``cpu.build`` compile ahead of time and say how it stands).

A backend module has

    supports(problem, visibility, mechanism) -> str | None                     None, or the sentence that says why not
    forward(problem, visibility, mechanism, seed) -> (out, rows)               [B, H, Lq, Dv], [4, B, H, Lq], the statistics
    prepare(problem, visibility, mechanism) -> function                        of query, key, value, to out; optional
    backward(grad, problem, visibility, mechanism, seed, bias_grad) -> the six gradients, None where there is none
    attend_cache(problem, cache, left, mechanism) -> out                       optional: reads a cache where it lies
    rows_kept(mechanism, value) -> int                                         optional: so many vectors of the rows come from
                                                                               forward, and backward gets (..., out, rows)
"""
