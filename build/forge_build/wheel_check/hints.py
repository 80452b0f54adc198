"""The way out, by kind of finding: shown after the cause, in this order."""

from __future__ import annotations

HINTS = {
    # the file itself
    "file-name": "name it as PEP 427 says: name-version-python-abi-platform.whl",
    "metadata": "the wheel was renamed or its version edited by hand: build it again",
    "version-demanded": "lock and build the version that is asked for",
    "record": "the wheel was changed after it was made: build or fetch it again",
    "duplicate-member": "build it again; installers differ in which of the two they keep",
    "unsafe-path": "do not install it",
    "pure-with-object": "build it with the platform's tag and Root-Is-Purelib: false",
    "newer-than-epoch": "set SOURCE_DATE_EPOCH while building",
    "oversize": "look for architectures or debug information that nobody asked for, or raise the budget in the manifest",
    # what it was built for
    "cuda-major": "the wheel was built for another CUDA: take the one for the lock's CUDA, or build it from source",
    "undefined-symbol": "it was compiled against another version: build it against the locked one, or lock the version named "
    "here; this is no architecture problem, whatever the import error says",
    "torch-release": "lock that release, or build the wheel against the locked one",
    "requires-other": "its authors tried it with the other version",
    "needed-not-allowed": "link against what the manifest's check.needed names, or add it there",
    "needed-not-provided": "add the package that holds it to the manifest, or the base's package",
    "rpath": "link with -Wl,-rpath,$ORIGIN/... or none: libraries come from the environment's wheels",
    "glibc-too-new": "build it on an older base, or raise the target's platform",
    "abi3": "build for each CPython version, or with Py_LIMITED_API",
    "machine": "it was built for another processor",
    "executable-stack": "link with -z noexecstack",
    "text-relocations": "compile with -fPIC",
    "broken-object": "the object cannot be judged, so it cannot pass: build it again",
    # its device code
    "no-device-code": "the extension was built without its kernels: look for the .cu files in the build's log",
    "architecture-missing": "add the architecture to the source's -gencode flags; sm_120 is not sm_120a",
    "op-without-architecture": "its source file was compiled with other -gencode flags than the rest; at run time this op alone "
    "fails with `no kernel image is available`",
    "instruction-missing": "the kernel was compiled for the architecture without its feature: check the `a` suffix and CUTLASS's "
    "architecture macros",
    "ptx-present": "drop code=compute_XX from -gencode: the driver would compile it at first use, without FP4 MMA",
    "foreign-architecture": "restrict the architectures in the source's own build files: TORCH_CUDA_ARCH_LIST alone may have "
    "no effect",
    "unmeasured": "what cannot be told apart cannot pass; a newer nvidia-cuda-cuobjdump may know this format",
}
