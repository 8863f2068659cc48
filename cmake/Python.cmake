# Builds the C++ code that Python calls: liger_ext_plans (device profiles and launch plans), which is free of Python, and over it
# liger_ext._C, one small module for each Python. Both are free of torch. So they also work if torch's libraries do not load. First the
# trace: ops, compiled for tensors without data.
file(GLOB trace_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/trace/*.cpp")
set(small_ops ${LIGER_OPS})
list(FILTER small_ops EXCLUDE REGEX "/(torch|boxed|tensor|loss|head|row_sum|fused_linear.*)[.]cpp$")
set(fast_ops ${LIGER_OPS})
list(FILTER fast_ops INCLUDE REGEX "/(tensor|loss|head|row_sum|fused_linear.*)[.]cpp$")
add_library(liger_trace OBJECT ${trace_sources} ${fast_ops})   # the fused loss runs it for each plan that it considers
add_library(liger_trace_small OBJECT ${small_ops})             # optimised for size: only tests, the doctor and tune run it
target_compile_options(liger_trace_small PRIVATE -Os)
foreach(target liger_trace liger_trace_small)
  target_include_directories(${target} PRIVATE csrc)
  target_compile_definitions(${target} PRIVATE LIGER_BACKEND=trace LIGER_IS_GPU=0 LIGER_IS_TRACE=1)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET default)
endforeach()

add_library(liger_ext_plans SHARED ${launch_sources} $<TARGET_OBJECTS:liger_trace> $<TARGET_OBJECTS:liger_trace_small>)
target_include_directories(liger_ext_plans PRIVATE csrc)
target_compile_definitions(liger_ext_plans PRIVATE LIGER_BACKEND=python)
set_target_properties(liger_ext_plans PROPERTIES CXX_VISIBILITY_PRESET default)   # _C calls its functions
liger_build_facts(liger_ext_plans plans "${cxx}" "")
install(TARGETS liger_ext_plans LIBRARY DESTINATION liger_ext/lib)

execute_process(COMMAND "${Python_EXECUTABLE}" -c "import pybind11; print(pybind11.get_include())"
                OUTPUT_VARIABLE pybind11_include OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE pybind11_missing ERROR_QUIET)
if(pybind11_missing)
  message(FATAL_ERROR "liger_ext needs pybind11 >= 3.0 and ${Python_EXECUTABLE} has none. Install it: pip install pybind11")
endif()

function(liger_python_module python)
  execute_process(COMMAND "${python}" -c "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';')"
                  OUTPUT_VARIABLE facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "LIGER_EXT_PYTHONS is '${LIGER_EXT_PYTHONS}', and '${python}' is no Python that runs here. Expected are "
                        "interpreters, separated by ';', e.g. '/usr/bin/python3.12;/usr/bin/python3.13'.")
  endif()
  list(GET facts 0 include)
  list(GET facts 1 suffix)
  if(NOT EXISTS "${include}/Python.h")
    message(FATAL_ERROR "${python} has no headers: ${include}/Python.h does not exist. Install them (Debian, Ubuntu: apt install python3-dev).")
  endif()
  string(MAKE_C_IDENTIFIER "_C${suffix}" target)
  # All ops are compiled as one file: their includes take longer to compile than they do.
  file(GLOB ops CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/python/ops/*.cpp")
  set_source_files_properties(${ops} PROPERTIES UNITY_GROUP ops)
  add_library(${target} MODULE csrc/python/module.cpp ${ops})
  target_include_directories(${target} PRIVATE csrc)
  target_include_directories(${target} SYSTEM PRIVATE "${pybind11_include}" "${include}")
  target_compile_definitions(${target} PRIVATE LIGER_BACKEND=python)
  target_link_libraries(${target} PRIVATE liger_ext_plans)
  # Most of the code is pybind11's templates, which compile faster for size than for speed (docs/measurements.md). With a sanitizer,
  # optimising them takes minutes.
  if(LIGER_EXT_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  else()
    target_compile_options(${target} PRIVATE -Os)
  endif()
  set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME _C SUFFIX "${suffix}" UNITY_BUILD ON UNITY_BUILD_MODE GROUP
                                             UNITY_BUILD_RELOCATABLE ON LIBRARY_OUTPUT_DIRECTORY "${LIGER_EXT_OUTPUT}/.."
                                             INSTALL_RPATH "$ORIGIN/lib")
  install(TARGETS ${target} LIBRARY DESTINATION liger_ext)
endfunction()

if(LIGER_EXT_SANITIZE)
  set_source_files_properties(${launch_sources} PROPERTIES COMPILE_OPTIONS -O1)
endif()
set(pythons ${LIGER_EXT_PYTHONS})
if(NOT pythons)
  set(pythons "${Python_EXECUTABLE}")
endif()
foreach(python ${pythons})
  liger_python_module("${python}")
endforeach()
