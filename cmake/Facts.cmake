# Records in each library how it was built: a line of JSON (csrc/build_facts.cpp.in), which Python reads without loading the library
# (liger_ext/_fit.py). The version is the package's.
set(cxx "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
function(liger_build_facts target backend compiler architectures)
  set(facts "${CMAKE_BINARY_DIR}/facts/${target}.cpp")
  configure_file("${CMAKE_SOURCE_DIR}/csrc/build_facts.cpp.in" "${facts}" @ONLY)
  target_sources(${target} PRIVATE "${facts}")
endfunction()
