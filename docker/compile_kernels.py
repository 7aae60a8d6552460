"""Compiles the C code of the package into its installation, so that an image needs no compiler where it runs."""

from longleaf import c_extension
from longleaf.comm import shm_rendezvous
from longleaf.kernels.cpu import block_attribution, decode, dequantize, fold, linear, quantized_linear, recurrent

for module in (decode, linear, quantized_linear, fold, recurrent, shm_rendezvous, block_attribution, dequantize):
    c_extension.install(module.SOURCE, module.FLAGS)
for library in sorted(c_extension.INSTALLED.iterdir()):
    print(library.name)
