"""Kernels for CPUs in C++, behind a plain C ABI: no compiler is needed to install Baton, and with one it is faster.

src        the sources: one shared library, with a file for each instruction set
build      read it first: how the sources are compiled, at installation and by `make native`
library    loads the library if it fits the sources and the CPU, and says why if it does not
packed     weights in the kernels' layout; shared: in a file that the workers of a host map
decoder    a forward pass over them
"""

KERNELS = ("auto", "native", "torch")
"""Values of the setting `kernels`; auto: native on CPUs with AVX2 or newer, if the library is there, else torch."""
