# Finds torch's headers and libraries with the Python that builds. Only the stable ABI is used. Under TORCH_TARGET_VERSION every other torch
# header refuses to compile, so compiling is the check.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import torch, os; print(os.path.dirname(torch.__file__)); print(torch.__version__)"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
if(torch_missing)
  message(FATAL_ERROR "liger_ext is built against torch's headers, and ${Python_EXECUTABLE} has no torch. "
                      "Install torch >= 2.11 first, then: pip install --no-build-isolation .")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 torch_root)
list(GET torch_facts 1 LIGER_TORCH_VERSION)
if(LIGER_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "liger_ext needs torch >= 2.11, found ${LIGER_TORCH_VERSION}")
endif()
set(LIGER_TORCH_LIB "${torch_root}/lib")
message(STATUS "torch ${LIGER_TORCH_VERSION} in ${torch_root}")

add_library(liger_torch INTERFACE)
target_include_directories(liger_torch SYSTEM INTERFACE "${torch_root}/include")
target_compile_definitions(liger_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
find_library(LIGER_TORCH_CPU_LIBRARY torch_cpu PATHS "${LIGER_TORCH_LIB}" NO_DEFAULT_PATH REQUIRED)
target_link_libraries(liger_torch INTERFACE "${LIGER_TORCH_CPU_LIBRARY}")

# The op files: tensors in, tensors out. Compiled once for the CPU library and the host target, once for the GPU libraries, and
# once for the trace (Python.cmake).
file(GLOB LIGER_OPS CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/ops/*.cpp")
