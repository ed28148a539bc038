"""The kernels, and the functions of tiles that they share."""
