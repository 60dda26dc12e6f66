"""Kernels for CPUs in C++, behind a plain C ABI: Baton installs without a compiler, and is faster with one.

src        the sources of one shared library, with a file for each instruction set
build      read it first: compiles the sources, at installation and by `make native`
library    loads the library, or says why it can't be used
packed     weights in the kernels' layout; shared: packed weights in a file that the workers of a host map
decoder    a forward pass on native kernels
collective exchanges between the ranks of one host: of tensor parallelism, and from stage to stage of a pipeline
abi        the library's structs and functions for ctypes; mapping: files and memory of shared weights
"""

KERNELS = ("auto", "native", "torch")
"""Values of the setting `kernels`. With auto, native kernels are used if the CPU has AVX2 and the library can be used,
and torch's operators otherwise."""
