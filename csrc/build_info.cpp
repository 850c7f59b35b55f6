// fsdp_quant._build_info: what the operators beside it were built from, as setup.py said when it compiled this file.
// Includes no torch header, so that it imports under any torch and a wrong pair is told apart before it is loaded.

#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

namespace py = pybind11;

namespace {

py::list split(const std::string& text, char separator) {
    py::list parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        parts.append(part);
    }
    return parts;
}

}  // namespace

PYBIND11_MODULE(_build_info, m) {
    m.doc() = "What the compiled operators of fsdp_quant were built from.";
    m.attr("torch") = FSDP_QUANT_BUILT_TORCH;
    m.attr("cuda") = FSDP_QUANT_BUILT_CUDA;
    m.attr("nvcc") = FSDP_QUANT_BUILT_NVCC;
    m.attr("architectures") = split(FSDP_QUANT_BUILT_ARCHITECTURES, ';');
    m.attr("nvcc_flags") = split(FSDP_QUANT_BUILT_NVCC_FLAGS, ' ');
}
