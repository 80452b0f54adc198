"""What a wheel may lean on without any wheel providing it: documented data, no logic.

The names and versions follow the manylinux policy (PEP 600, PEP 599, PEP 571, PEP 513) and glibc's and GCC's own version
scripts.
"""

from __future__ import annotations

import re

# glibc, libstdc++ and libgcc_s: what the manylinux policy lets a wheel NEED and what every base has. Left out on purpose:
# libatomic, libnsl, libz, libexpat and the X and GL libraries, which the policy allows but a minimal base lacks.
C_FAMILY = frozenset(
    {
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libm.so.6",
        "libmvec.so.1",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "libutil.so.1",
        "libresolv.so.2",
        "libanl.so.1",
        "libstdc++.so.6",
        "libgcc_s.so.1",
    }
)

# Symbol versions of the family's libraries; GLIBC_PRIVATE is not among them: it changes with every release.
C_FAMILY_VERSION = re.compile(r"^(?:GLIBC_(?:\d|ABI_)|GLIBCXX_|CXXABI_|GCC_\d)")

GLIBC_VERSION = re.compile(r"^GLIBC_(\d+)\.(\d+)(?:\.\d+)?$")

# Version nodes without a number, and the release that brought them.
GLIBC_NAMED_NODES = {"GLIBC_ABI_DT_RELR": (2, 36)}

# Platform tags older than PEP 600, as the glibc they promise to run on.
LEGACY_TAGS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}

# The driver is part of the host, so no wheel provides it; a wheel may NEED it only where the manifest says so.
DRIVER = {
    "libcuda.so.1": re.compile(r"^cu[A-Z]\w*$"),
    "libnvidia-ml.so.1": re.compile(r"^nvml[A-Z]\w*$"),
}

# CPython exports these from the executable or libpython; an extension module does not NEED it (PEP 513).
PYTHON_SYMBOL = re.compile(r"^_?Py[A-Z_]\w*$")

# Threads, dlopen and C99 mathematics: objects linked without -lpthread, -ldl and -lm ask for these without a version
# (published wheels of triton, numpy, pandas, pillow and xgrammar do). CPython itself has all three loaded.
UNVERSIONED_C_SYMBOL = re.compile(
    r"^(?:pthread_[a-z_]+|sem_[a-z]+|dl(?:open|close|sym|vsym|error|addr1?|info|mopen)"
    r"|(?:a?(?:sin|cos|tan)h?|atan2|sincos|exp(?:2|m1)?|log(?:2|10|1p|b)?|ilogb|pow|sqrt|cbrt|hypot|erfc?|[lt]gamma"
    r"|ceil|floor|trunc|l?l?round|l?l?rint|nearbyint|fmod|remainder|remquo|fma|fdim|fmin|fmax|fabs|modf|frexp|scalbl?n"
    r"|ldexp|copysign|nan|nextafter|nexttoward)[fl]?)$"
)

# Libraries that an importing process has loaded globally before the module, with the symbols each is asked for: FlashInfer
# loads TVM FFI first, torch extensions come after `import torch`. First match is looked at first.
PRELOADED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("libtvm_ffi.so", re.compile(r"^_?TVMFFI|^_ZNK?3tvm3ffi")),
    ("libc10.so", re.compile(r"3c10")),
    ("libc10_cuda.so", re.compile(r"3c104cuda")),
    ("libtorch_python.so", re.compile(r"THP|5torch|8pybind11")),
    ("libtorch_cuda.so", re.compile(r"2at|5torch")),
    ("libtorch_cpu.so", re.compile(r"2at|5torch|3c10|^aoti_torch_|^torch_")),
)

# Libraries whose soname is CUDA's own major version; libcusparse, libcusolver, libcufft and libcurand count for themselves.
CUDA_MAJOR_SONAME = re.compile(
    r"^lib(?:cudart|cublas|cublasLt|nvblas|nvrtc|nvrtc-builtins|nvJitLink|nvfatbin)\.so\.(\d+)"
)

# Which package holds a library, where a lock's wheel is not at hand and must be brought to look into it.
PROVIDERS: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (re.compile(soname), re.compile(rf"{package}(?:-cu\d+)?"))
    for soname, package in (
        (r"lib(?:c10|torch|shm|caffe2)(?:_\w+)?\.so", "torch"),
        (r"libcudart\.so", "nvidia-cuda-runtime"),
        (r"lib(?:cublas|cublasLt|nvblas)\.so", "nvidia-cublas"),
        (r"libnvrtc(?:-builtins)?\.so", "nvidia-cuda-nvrtc"),
        (r"libnvJitLink\.so", "nvidia-nvjitlink"),
        (r"libcusparse\.so", "nvidia-cusparse"),
        (r"libcusparseLt\.so", "nvidia-cusparselt"),
        (r"libcusolver(?:Mg)?\.so", "nvidia-cusolver"),
        (r"libcufftw?\.so", "nvidia-cufft"),
        (r"libcurand\.so", "nvidia-curand"),
        (r"libcupti\.so", "nvidia-cuda-cupti"),
        (r"libcudnn\w*\.so", "nvidia-cudnn"),
        (r"libnccl\.so", "nvidia-nccl"),
        (r"libnvshmem_host\.so", "nvidia-nvshmem"),
        (r"libtvm_ffi\.so", "apache-tvm-ffi"),
    )
)

# Symbols without a version, by the library that has them: where it is absent, its absence is the finding.
SYMBOLS_OF: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (re.compile(soname), re.compile(symbol))
    for soname, symbol in (
        (r"libcudart\.so", r"^(?:cuda[A-Z]|__cuda[A-Z])\w*$"),
        (r"libcublas\.so", r"^cublas(?!Lt)\w+$"),
        (r"libcublasLt\.so", r"^cublasLt\w+$"),
        (r"libnvrtc\.so", r"^nvrtc\w+$"),
        (r"libnuma\.so", r"^numa_\w+$"),
        (r"libtorch_cuda\.so", r"^_ZN?K?(?:2at|5torch)(?:4cuda|\d+CUDA)"),
        (r"libc10_cuda\.so", r"^_ZN?K?3c104cuda"),
    )
)
