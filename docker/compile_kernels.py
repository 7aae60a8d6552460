"""Compiles the C code of the package into its installation, so that an image needs no compiler where it runs."""

from longleaf import native
from longleaf.comm import meet
from longleaf.kernels.cpu import decode, fold, shares

for module in (decode, fold, meet, shares):
    native.install(module.SOURCE, module.FLAGS)
for library in sorted(native.INSTALLED.iterdir()):
    print(library.name)
