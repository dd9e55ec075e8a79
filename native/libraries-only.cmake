# Given to llama-cpp-python's own build by the Makefile: of llama.cpp only the libraries are wanted.  The "common" part,
# which serves its command-line tools, would take almost half of the time, and nothing here or in llama_cpp loads it.
set(LLAMA_BUILD_COMMON OFF)
