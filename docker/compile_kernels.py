"""Compiles the C code of the package into its installation, so that an image needs no compiler where it runs."""

from longleaf import c_extension
from longleaf.comm import meet
from longleaf.kernels.cpu import decode, fold, shares

for module in (decode, fold, meet, shares):
    c_extension.install(module.SOURCE, module.FLAGS)
for library in sorted(c_extension.INSTALLED.iterdir()):
    print(library.name)
