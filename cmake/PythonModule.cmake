# liger_ext._C: torch-free, so that it works (and explains what is missing) where torch's libraries do not load.
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG QUIET)
if(NOT pybind11_FOUND)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_package(pybind11 CONFIG REQUIRED)
endif()
# One compilation for all ops: what they include takes longer than they do.
file(GLOB python_ops CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/python/ops/*.cpp")
set_source_files_properties(${python_ops} PROPERTIES UNITY_GROUP ops)
pybind11_add_module(_C csrc/python/module.cpp ${python_ops} ${launch_sources})
target_include_directories(_C PRIVATE csrc)
target_compile_definitions(_C PRIVATE LIGER_BACKEND=python
  LIGER_EXT_VERSION="${PROJECT_VERSION}" LIGER_TORCH_VERSION="${LIGER_TORCH_VERSION}"
  LIGER_GPU_BACKEND="${LIGER_EXT_GPU_BACKEND}" LIGER_GPU_ARCHS="${LIGER_GPU_ARCH_TEXT}"
  LIGER_GPU_COMPILER="${LIGER_GPU_COMPILER_TEXT}")
if(LIGER_EXT_SANITIZE)   # with one, pybind11's code takes minutes to optimise
  target_compile_options(_C PRIVATE -O0)
  set_source_files_properties(${launch_sources} PROPERTIES COMPILE_OPTIONS -O1)
endif()
set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP LIBRARY_OUTPUT_DIRECTORY "${LIGER_EXT_OUTPUT}/..")
install(TARGETS _C LIBRARY DESTINATION liger_ext)
