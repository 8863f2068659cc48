# Builds the objects of the HIP library into a library for CPU tensors, whose launches Python executes in an emulator (tests/amd/device.py).
# It replaces the CPU library and has its name: LIGER_EXT_LIB names its folder.
add_library(liger_ext_emulated SHARED EXCLUDE_FROM_ALL csrc/schemas.cpp ${LIGER_OPS} ${launch_sources} tests/amd/runtime.cpp ${hip_objects})
set_target_properties(liger_ext_emulated PROPERTIES OUTPUT_NAME liger_ext_cpu LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/emulated")
target_include_directories(liger_ext_emulated PRIVATE csrc)
target_compile_definitions(liger_ext_emulated PRIVATE LIGER_BACKEND=gpu LIGER_DISPATCH_KEY=CPU LIGER_IS_GPU=1)
set_property(SOURCE tests/amd/runtime.cpp PROPERTY COMPILE_DEFINITIONS __HIP_PLATFORM_AMD__)
# Functions that replace those of other libraries do so in this library alone.
target_link_options(liger_ext_emulated PRIVATE "-Wl,--version-script=${CMAKE_SOURCE_DIR}/tests/amd/exports.map")
target_link_libraries(liger_ext_emulated PRIVATE liger_torch ${CMAKE_DL_LIBS})
liger_build_facts(liger_ext_emulated emulated "${hip_version}" "${architectures}")
