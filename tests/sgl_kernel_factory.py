"""Makes packages shaped like sgl-kernel: the lines that the series for it changes, and around them a tiny package of our own.

The lines come from the patches themselves (`sparse_patch`), so nothing of theirs is written twice, and what is generated here
follows a patch that changes. Operators are registered by macros of our own: torch's headers would take most of the time.
"""

import re
from pathlib import Path

from git_factory import Origin
from sparse_patch import before, filled

from forge_build.patch import series_folder

VERSION = "0.3.21"
SERIES = series_folder("sgl-kernel", "sm120")
OWN = ("repo-cutlass", "repo-flashinfer")
"""The repositories whose commits the package names itself; those of the others stand in the patches."""

FP4 = "csrc/gemm/nvfp4_scaled_mm_entry.cu"
"""One unit has all that is FP4: each costs a second."""

_OPERATORS = {
    "csrc/allreduce/custom_all_reduce.cu": r"all_reduce",
    "csrc/allreduce/mscclpp_allreduce.cu": r"mscclpp_\w+",
    FP4: r"\w*fp4\w*",
    "flash_sparse_api.cpp": r"flash::\w+",
    # the rest
    "csrc/attention/cascade.cu": r"(?!flash::)\w+",
}
"""Unit -> the operators it defines, those that an earlier unit did not."""

_CMAKE = {
    "include(FetchContent)": """
cmake_minimum_required(VERSION 3.26 FATAL_ERROR)
project(sgl-kernel LANGUAGES CXX CUDA)
include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
""",
    "find_package(CUDAToolkit REQUIRED)": """
set(CMAKE_SHARED_LIBRARY_PREFIX "")
find_package(Python COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT} REQUIRED)
set(CMAKE_CXX_STANDARD 17)
""",
    "find_package(Torch REQUIRED)": "endif()",
    "FetchContent_Populate(repo-deepgemm)": """
    repo-cutlass
    GIT_REPOSITORY @repo-cutlass@
    GIT_TAG        @commit:repo-cutlass@
    GIT_SHALLOW    OFF
)
FetchContent_Populate(repo-cutlass)
FetchContent_Declare(
    repo-deepgemm
    GIT_REPOSITORY @repo-deepgemm@
""",
    "FetchContent_Populate(repo-fmt)": "    repo-fmt\n    GIT_REPOSITORY @repo-fmt@",
    "FetchContent_Populate(repo-triton)": "    repo-triton\n    GIT_REPOSITORY @repo-triton@",
    "FetchContent_Populate(repo-flash-attention)": """
    repo-flashinfer
    GIT_REPOSITORY @repo-flashinfer@
    GIT_TAG        @commit:repo-flashinfer@
    GIT_SHALLOW    OFF
)
FetchContent_Populate(repo-flashinfer)
FetchContent_Declare(
    repo-flash-attention
    GIT_REPOSITORY @repo-flash-attention@
""",
    "FetchContent_Populate(repo-mscclpp)": "    repo-mscclpp\n    GIT_REPOSITORY @repo-mscclpp@",
    '"-gencode=arch=compute_90,code=sm_90"': """
option(ENABLE_BELOW_SM90 "Older architectures too" ON)
include_directories(${PROJECT_SOURCE_DIR}/include)
set(SGL_KERNEL_CUDA_FLAGS
    "-DNDEBUG"
""",
    "option(SGL_KERNEL_ENABLE_BF16": """
)
set(SGL_KERNEL_COMPILE_THREADS 32 CACHE STRING "Architectures that one nvcc compiles at once")
list(APPEND SGL_KERNEL_CUDA_FLAGS "--threads=${SGL_KERNEL_COMPILE_THREADS}")
""",
    "if (ENABLE_BELOW_SM90)": """
        "-DFLASHINFER_ENABLE_BF16"
    )
endif()
if (SGL_KERNEL_ENABLE_FP8)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-DFLASHINFER_ENABLE_FP8"
""",
    "set(SOURCES": 'list(APPEND SGL_KERNEL_CUDA_FLAGS "-DENABLE_NVFP4=1")',
    "${repo-flashinfer_SOURCE_DIR}/csrc/norm.cu": "@sources@",
    "${repo-cutlass_SOURCE_DIR}/tools/util/include": "    ${repo-cutlass_SOURCE_DIR}/include",
    'DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sm90"': """
    $<$<COMPILE_LANGUAGE:CUDA>:${SGL_KERNEL_CUDA_FLAGS} -use_fast_math>
)
target_include_directories(common_ops_sm90_build PRIVATE ${INCLUDES})
set_target_properties(common_ops_sm90_build PROPERTIES
""",
    "set(MSCCLPP_USE_CUDA ON)": """
Python_add_library(common_ops_sm100_build MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI ${SOURCES})
target_compile_options(common_ops_sm100_build PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${SGL_KERNEL_CUDA_FLAGS}>)
target_include_directories(common_ops_sm100_build PRIVATE ${INCLUDES})
set_target_properties(common_ops_sm100_build PROPERTIES
    OUTPUT_NAME "common_ops"
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sm100"
)
""",
    "# Install to different subdirectories": "    FLASHATTENTION_DISABLE_UNEVEN_K\n)",
    "target_compile_definitions(flash_ops PRIVATE": """
if (SGL_KERNEL_ENABLE_FA3)
    set(FLASH_OPS_COMPILE_DEFS FLASHATTENTION_DISABLE_BACKWARD)
    Python_add_library(flash_ops MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI
        "${repo-flash-attention_SOURCE_DIR}/hopper/flash_fwd_sm90.cu" "csrc/flash_extension.cc")
    target_compile_options(flash_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a>)
    target_link_libraries(flash_ops PRIVATE ${TORCH_LIBRARIES} c10 cuda)
    install(TARGETS flash_ops LIBRARY DESTINATION sgl_kernel)
""",
    "target_link_libraries(spatial_ops": """
    "csrc/spatial/extension.cc"
)
Python_add_library(spatial_ops MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI ${SPATIAL_SOURCES})
""",
    "Python_add_library(deep_gemm_cpp": '    "${repo-deepgemm_SOURCE_DIR}/csrc/python_api.cpp"\n)',
    'install(DIRECTORY "${repo-cutlass_SOURCE_DIR}/include/cutlass/"': """
    ${repo-deepgemm_SOURCE_DIR}/csrc
    ${repo-cutlass_SOURCE_DIR}/include
    ${repo-fmt_SOURCE_DIR}/include
)
install(TARGETS deep_gemm_cpp LIBRARY DESTINATION "deep_gemm")
""",
}
_REGISTRATION = {
    '#include "sgl_kernel_ops.h"': "// Registers the operators of a package that a test generates.",
    'm.impl("all_reduce"': '  m.def(\n      "all_reduce(Tensor inp, "',
    'm.def("mscclpp_allreduce': '      "int rest) -> int");',
    'm.def("sgl_per_token_quant_fp8': "   */",
    'm.impl("scaled_fp4_quant"': """
      "                      Tensor alpha) -> ()");
  m.impl("cutlass_scaled_fp4_mm", torch::kCUDA, &cutlass_scaled_fp4_mm);

  m.def(
      "scaled_fp4_quant(Tensor! output, Tensor! input,"
""",
    'm.impl("cutlass_fp4_group_mm"': """
      "scaled_fp4_experts_quant(Tensor! output) -> ()");

  m.def(
      "cutlass_fp4_group_mm(Tensor! output,"
""",
    "* From Sparse Flash Attention": "",
    'm.impl("varlen_fwd_sparse"': """
      "Generator? gen) -> Tensor[]");
  m.def(
      "varlen_fwd_sparse(Tensor! q, "
""",
    'm.impl("es_sm100_mxfp8_blockscaled_grouped_quant"': """
      "convert_vertical_slash_indexes(Tensor! block_count) -> ()");
  m.def(
""",
}
_LOADER = {
    'logger.debug(f"[sgl_kernel] sgl_kernel directory': """
import importlib.util
import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def _load_architecture_specific_ops():
    compute_capability = None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        compute_capability = 10 * major + minor
    sgl_kernel_dir = Path(__file__).parent
""",
    "": """
        ops_subdir = "sm100"
        variant_name = f"SM{compute_capability}"
    else:
        ops_subdir = "sm100"
        variant_name = "no GPU"
    (path,) = (sgl_kernel_dir / ops_subdir).glob("common_ops.*")
    logger.debug(f"{variant_name}: {path}")
    spec = importlib.util.spec_from_file_location("common_ops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
""",
}
_FLASH = {
    "from sgl_kernel import flash_ops": "from functools import lru_cache\nfrom typing import Optional\n\nimport torch",
    '(torch.version.cuda >= "12.3")': "def is_fa3_supported(device=None) -> bool:",
    "k_cache.stride(-1) == 1": """
    return x.contiguous() if x.stride(-1) != 1 else x


def flash_attn_with_kvcache(q, k_cache, v_cache, qv=None, softmax_scale=None):
""",
    "ver=3,": """
        )
    return flash_ops.fwd(q, k_cache, v_cache, softmax_scale)


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q=None,
    max_seqlen_k=None,
""",
    "": """
        raise ValueError("max_seqlen_q and max_seqlen_k are needed")
    return flash_ops.fwd(q, k, v, max_seqlen_q, max_seqlen_k)
""",
}

_PYPROJECT = """
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"

[project]
name = "sgl-kernel"
version = "{version}"

[tool.scikit-build]
cmake.build-type = "Release"
wheel.py-api = "cp310"
wheel.packages = ["python/sgl_kernel"]
wheel.license-files = []
"""
# A torch that is built for CUDA sets these; the one of the tests is not.
_UTILS = """
macro(clear_cuda_arches flags)
    set(CUDA_VERSION "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")
    set(CMAKE_CUDA_ARCHITECTURES OFF)
endmacro()
"""
_HEADER = """
#pragma once
#include <c10/core/DeviceType.h>
namespace torch { constexpr auto kCUDA = c10::DeviceType::CUDA; }
struct Operators {
  const char* names[64];
  int count = 0;
  void def(const char*) {}
  void def(const char* name, void (*)()) { names[count++] = name; }
  void impl(const char* name, void (*)()) { names[count++] = name; }
  void impl(const char* name, c10::DeviceType device, void (*)()) {
    // asks libc10, as a real registration does
    if (c10::isValidDeviceType(device)) names[count++] = name;
  }
};
#define TORCH_LIBRARY_FRAGMENT(space, m) static void registered(Operators& m)
"""
_MODULE = """
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "shape", nullptr, -1, nullptr};
"""
_REGISTER = """
#define REGISTER_EXTENSION(name)                                                        \\
  PyMODINIT_FUNC PyInit_##name() {                                                      \\
    Operators found;                                                                    \\
    registered(found);                                                                  \\
    PyObject* list = PyList_New(0);                                                     \\
    for (int i = 0; i < found.count; ++i)                                               \\
      PyList_Append(list, PyUnicode_FromString(found.names[i]));                        \\
    PyObject* module = PyModule_Create(&definition);                                    \\
    PyModule_AddObject(module, "operators", list);                                      \\
    return module;                                                                      \\
  }
"""
_INIT = """
from sgl_kernel.load_utils import _load_architecture_specific_ops

common_ops = _load_architecture_specific_ops()
from sgl_kernel.version import __version__
"""


def dependencies() -> dict[str, dict[str, str]]:
    """What the package would fetch: name -> path -> text."""
    flash = "csrc/flash_attn/src/flash_fwd_sparse_hdim128"
    return {
        # Its header is what a unit for the host compiler stumbles over with CUDA 13.
        "repo-cutlass": {
            "include/cutlass/fast_math.h": "#pragma once\n#include <cuda/std/utility>\n"
            "inline int larger(int a, int b) { return a < b ? b : a; }\n",
            "LICENSE.txt": "the licence of a test\n",
        },
        "repo-flashinfer": {
            "include/flashinfer/vec.cuh": "#pragma once\nstruct vec { float data[4]; };\n",
            "csrc/norm.cu": _kernel("norm", header="flashinfer/vec.cuh"),
            "csrc/renorm.cu": _kernel("renorm"),
            "LICENSE": "the licence of a test\n",
        },
        "repo-deepgemm": {"csrc/python_api.cpp": _extension("deep_gemm_cpp")},
        "repo-fmt": {"include/fmt.h": "#pragma once\n"},
        "repo-triton": {"python/triton_kernels/triton_kernels/__init__.py": ""},
        "repo-flash-attention": {
            "hopper/flash_fwd_sm90.cu": _kernel("flash_fwd_sm90"),
            **{f"{flash}_{kind}_sm80.cu": _kernel(kind) for kind in ("bf16", "bf16_causal", "fp16", "fp16_causal")},
            # `flash_sparse_api.cpp` depends on what the package calls of it
        },
        # Old enough for CMake 4 to refuse it, with a unit for the host compiler that wants CCCL.
        "repo-mscclpp": {
            "CMakeLists.txt": "cmake_minimum_required(VERSION 3.2)\nproject(mscclpp LANGUAGES CXX)\n"
            "add_library(mscclpp_static STATIC src/atomic.cc)\n",
            "src/atomic.cc": "#include <cuda/atomic>\nint mscclpp_atomic() { return 1; }\n",
            "include/mscclpp.hpp": "#pragma once\n",
        },
    }


def package(urls: dict[str, str], commits: dict[str, str]) -> dict[str, str]:
    """The package's files, before any patch: path -> text. `urls` are of all repositories, `commits` of `OWN`."""
    known = before(SERIES)
    registration = filled(known.pop("csrc/common_extension.cc"), _REGISTRATION)
    sources = "\n".join(
        f'    "{name}"' for name in ("csrc/common_extension.cc", FP4, "csrc/memory/weak_ref_tensor.cpp")
    )
    cmake = filled(known.pop("CMakeLists.txt"), _CMAKE | {"${repo-flashinfer_SOURCE_DIR}/csrc/norm.cu": sources})
    cmake = re.sub(r"@commit:([\w-]+)@", lambda found: commits[found[1]], cmake)
    cmake = re.sub(r"@(repo-[\w-]+)@", lambda found: urls[found[1]], cmake)
    operators = list(dict.fromkeys(re.findall(r"&([\w:]+)\)", registration)))
    declared = "".join(_in_space(name, f"void {name.rpartition('::')[2]}();") for name in operators)
    files = {
        "CMakeLists.txt": cmake,
        "LICENSE": "the licence of a test\n",
        "cmake/utils.cmake": _UTILS.lstrip(),
        "cmake/flashmla.cmake": "# Nothing is built here.\n",
        "pyproject.toml": _PYPROJECT.format(version=VERSION).lstrip(),
        "include/sgl_kernel_ops.h": _HEADER.lstrip() + declared + _MODULE + _REGISTER,
        "csrc/common_extension.cc": registration,
        "csrc/memory/weak_ref_tensor.cpp": '#include "cutlass/fast_math.h"\nint weak() { return larger(1, 2); }\n',
        "csrc/flash_extension.cc": _extension("flash_ops"),
        "csrc/spatial/extension.cc": _extension("spatial_ops"),
        "python/sgl_kernel/__init__.py": _INIT.lstrip(),
        "python/sgl_kernel/version.py": f'__version__ = "{VERSION}"\n',
        "python/sgl_kernel/load_utils.py": filled(known.pop("python/sgl_kernel/load_utils.py"), _LOADER),
        "python/sgl_kernel/flash_attn.py": filled(known.pop("python/sgl_kernel/flash_attn.py"), _FLASH),
    }
    assert not known, f"the series changes files that nothing is written for: {sorted(known)}"
    left = operators
    for unit, pattern in _OPERATORS.items():
        if unit.endswith(".cu"):
            mine = [name for name in left if re.fullmatch(pattern, name)]
            files[unit] = _kernel(Path(unit).stem, mine)
            left = [name for name in left if name not in mine]
    for unit in re.findall(r'"(csrc/[\w/]+\.cu)"', cmake):
        files.setdefault(unit, _kernel(Path(unit).stem))
    return files


def sparse_attention(files: dict[str, str]) -> str:
    """`flash_sparse_api.cpp` of repo-flash-attention for a package's files."""
    called = dict.fromkeys(re.findall(r"&(flash::\w+)\)", files["csrc/common_extension.cc"]))
    return "".join(_in_space(name, f"void {name.rpartition('::')[2]}() {{}}") for name in called)


def write(files: dict[str, str], folder: Path) -> Path:
    """Write files into the new folder `folder`; returns it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


class Repositories:
    """The package and what it would fetch, as git repositories; nothing of it needs a network."""

    def __init__(self, folder: Path) -> None:
        self.origins = {name: Origin(folder / name) for name in dependencies()}
        self.commits = {name: self.origins[name].commit(dependencies()[name]) for name in OWN}
        self.files = package({name: origin.url for name, origin in self.origins.items()}, self.commits)
        self.source = Origin(folder / "sglang")
        self.commit = self.source.commit({f"sgl-kernel/{name}": text for name, text in self.files.items()})

    def declared(self) -> dict[str, str]:
        """Commit or tag of each repository, as the package names it."""
        pattern = r"^ +(repo-\S+)\s+GIT_REPOSITORY \S+\s+GIT_TAG +(\S+)$"
        return dict(re.findall(pattern, self.files["CMakeLists.txt"], re.MULTILINE))

    def trees(self, folder: Path) -> dict[str, Path]:
        """Every repository's files below `folder`, also of those that the series drops."""
        more = {"csrc/flash_attn/flash_sparse_api.cpp": sparse_attention(self.files)}
        return {
            name: write(files | (more if name == "repo-flash-attention" else {}), folder / name)
            for name, files in dependencies().items()
        }


def _in_space(name: str, text: str) -> str:
    space = name.rpartition("::")[0]
    return f"namespace {space} {{ {text} }}\n" if space else f"{text}\n"


def _kernel(stem: str, operators: list[str] | tuple[str, ...] = (), header: str | None = None) -> str:
    """A unit with one kernel, which its operators launch."""
    include = f'#include "{header}"\n' if header else ""
    launched = "".join(f"void {name}() {{ {stem}_kernel<<<1, 32>>>(nullptr); }}\n" for name in operators)
    return (
        f"{include}__global__ void {stem}_kernel(float* x) {{ if (x != nullptr) x[threadIdx.x] *= 2.0f; }}\n"
        f"{launched or f'void {stem}() {{ {stem}_kernel<<<1, 32>>>(nullptr); }}'}"
    )


def _extension(name: str) -> str:
    """A Python extension without anything in it."""
    return f"{_MODULE}PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&definition); }}\n"
