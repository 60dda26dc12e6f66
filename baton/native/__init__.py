"""Kernels for CPUs in C++, behind a plain C ABI: Baton installs without a compiler, and is faster with one.

src        the sources: one shared library, with a file for each instruction set
build      read it first: compiles the sources, at installation and by `make native`
library    loads the library if it fits the sources and the CPU, else has the reason
packed     weights in the kernels' layout; shared: in a file that the workers of a host map
decoder    a forward pass over them
"""

KERNELS = ("auto", "native", "torch")
"""Values of the setting `kernels`; auto: native on CPUs with AVX2 or newer, if the library is there, else torch."""
