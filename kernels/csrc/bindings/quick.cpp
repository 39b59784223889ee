// The quick test of a call's tensors: kernels/_tensors.py says what it accepts. Only where a mode of torch is active, the
// methods it calls run Python code.
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <tuple>
#include <vector>

#include "../core/types.h"
#include "bindings.h"

namespace {

using kernels::DType;
using kernels::kInt32;
using kernels::kInt64;

// What is needed here of DLPack's C exchange API, version 1.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t type, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major, minor;
  const void *previous, *allocate, *from_object, *to_object;
  int (*describe)(void* object, DLTensor* tensor);
};

constexpr int kCpu = 1;

// -1 for types that no kernel takes.
int dtype_code(const DLTensor& t) {
  constexpr int kInt = 0, kFloat = 2, kBfloat = 4;
  switch (t.lanes == 1 ? 100 * t.type + t.bits : -1) {
    case 100 * kBfloat + 16: return int(DType::kBf16);
    case 100 * kFloat + 16: return int(DType::kFp16);
    case 100 * kFloat + 32: return int(DType::kFp32);
    case 100 * kInt + 32: return kInt32;
    case 100 * kInt + 64: return kInt64;
    default: return -1;
  }
}

// The methods of torch's tensors that DLPack does not replace.
struct Torch {
  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor"), parameter = torch.attr("nn").attr("Parameter");
    is_neg = tensor.attr("is_neg"), storage = tensor.attr("untyped_storage");
    storage_offset = tensor.attr("storage_offset"), num_bytes = torch.attr("UntypedStorage").attr("nbytes");
    const py::object api = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(api.ptr(), "dlpack_exchange_api")) return;  // an older torch
    const auto* functions =
        static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (functions->major == 1) describe = functions->describe;
  }

  bool knows(PyObject* object) const {  // subclasses may answer otherwise
    return describe && (is(object, tensor) || is(object, parameter));
  }

  py::object tensor, parameter, is_neg, storage, storage_offset, num_bytes;
  int (*describe)(void*, DLTensor*) = nullptr;

 private:
  static bool is(PyObject* object, const py::object& type) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
  }
};

// Null, with no error set, where the method raises one.
py::object call(const py::object& method, PyObject* self) {
  PyObject* const result = PyObject_Vectorcall(method.ptr(), &self, 1, nullptr);
  if (!result) PyErr_Clear();
  return py::reinterpret_steal<py::object>(result);
}

// A new tuple; null, with an error set, where memory is short.
PyObject* numbers_of(const int64_t* numbers, Py_ssize_t count) {
  PyObject* const tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple && i < count; ++i) {
    PyObject* const number = PyLong_FromLongLong(numbers[i]);
    if (!number) return Py_DECREF(tuple), nullptr;
    PyTuple_SET_ITEM(tuple, i, number);
  }
  return tuple;
}

// What a call's tensor must be.
struct Expected {
  std::string dims;  // a letter each, of a size; upper case: not 0
  unsigned dtypes;   // a bit for each code
  int like;          // or the type of this tensor, which comes before; -1: of none
  bool contiguous, written, optional;

  bool has_choice() const { return (like >= 0) + __builtin_popcount(dtypes) > 1; }
};

// What a call's tensor is; all 0 for None. The strides are those of the first dimension.
struct Found {
  uintptr_t start, end;
  int64_t stride, stride_bytes, row_bytes;
  int code;
};

bool overlap(const Found& a, const Found& b) { return a.start < b.end && b.start < a.end; }

// Whether the rows of one lie between those of the other: tensors of one shape and type that overlap otherwise.
bool alternate(const Found& a, const Found& b) {
  if (a.stride_bytes <= 0) return false;
  const int64_t distance = int64_t(a.start - b.start) % a.stride_bytes;
  const int64_t offset = distance < 0 ? distance + a.stride_bytes : distance;
  return a.stride == b.stride && a.row_bytes <= offset && offset <= a.stride_bytes - a.row_bytes;
}

class Quick {
 public:
  using Given = std::tuple<std::string, unsigned, int, bool, bool, bool>;  // as Expected

  explicit Quick(const std::vector<Given>& given) {
    for (const auto& [dims, dtypes, like, contiguous, written, optional] : given) {
      expected_.push_back({dims, dtypes, like, contiguous, written, optional});
      for (const char letter : dims)
        if (letters_.find(lower(letter)) == std::string::npos) letters_.push_back(lower(letter));
    }
    if (expected_.size() > kMost || letters_.size() > kMost) throw py::value_error("too many tensors or sizes");
  }

  // A new reference: the sizes and where the tensors lie, or None.
  PyObject* operator()(PyObject* const* tensors, Py_ssize_t count) const {
    Found found[kMost] = {};
    int64_t sizes[kMost];
    std::fill_n(sizes, kMost, kUnknown);
    bool is_well = count == Py_ssize_t(expected_.size());
    for (size_t i = 0; is_well && i < expected_.size(); ++i)
      is_well = (tensors[i] == Py_None && expected_[i].optional) || read(tensors[i], i, found, sizes);
    if (!is_well || !disjoint(found)) Py_RETURN_NONE;
    return Py_BuildValue("NN", numbers_of(sizes, Py_ssize_t(letters_.size())), places(found));
  }

 private:
  static constexpr int kMost = 8;
  static constexpr int64_t kUnknown = -1;

  static char lower(char letter) { return char(std::tolower(letter)); }

  bool read(PyObject* tensor, size_t i, Found* found, int64_t* sizes) const {
    if (!torch_.knows(tensor)) return false;
    const py::object storage = call(torch_.storage, tensor), offset = call(torch_.storage_offset, tensor);
    const py::object held = storage ? call(torch_.num_bytes, storage.ptr()) : py::object();
    if (!offset || !held || call(torch_.is_neg, tensor).ptr() != Py_False) return false;
    DLTensor t;
    if (torch_.describe(tensor, &t)) return PyErr_Clear(), false;
    return accept(t, PyLong_AsLongLong(held.ptr()), PyLong_AsLongLong(offset.ptr()), expected_[i], found, found[i],
                  sizes);
  }

  bool accept(const DLTensor& t, int64_t held_bytes, int64_t storage_offset, const Expected& expected,
              const Found* before, Found& found, int64_t* sizes) const {
    found.code = dtype_code(t);
    if (t.device_type != kCpu || t.num_dims != int(expected.dims.size()) || found.code < 0 || !t.strides) return false;
    const bool is_like = expected.like >= 0 && before[expected.like].code == found.code;
    if (!is_like && !(expected.dtypes >> found.code & 1)) return false;
    for (int dim = 0; dim < t.num_dims; ++dim) {
      const char letter = expected.dims[dim];
      int64_t& size = sizes[letters_.find(lower(letter))];
      if (size == kUnknown) size = t.shape[dim];
      if (size != t.shape[dim] || (size == 0 && letter != lower(letter))) return false;
    }
    return place(t, held_bytes, storage_offset, expected.contiguous, found);
  }

  // Where a tensor lies that has contiguous rows, or is contiguous, within its storage.
  static bool place(const DLTensor& t, int64_t held_bytes, int64_t storage_offset, bool needs_contiguous,
                    Found& found) {
    const int64_t item_bytes = t.bits / 8, num_rows = t.shape[0];
    bool has_contiguous_rows = true;
    int64_t row = 1;  // elements
    for (int dim = t.num_dims - 1; dim > 0; --dim) {
      has_contiguous_rows &= t.shape[dim] == 1 || t.strides[dim] == row;
      row *= t.shape[dim];
    }
    const bool is_empty = row == 0 || num_rows == 0;
    const bool is_contiguous = is_empty || (has_contiguous_rows && (num_rows == 1 || t.strides[0] == row));
    if (!is_contiguous && (needs_contiguous || !has_contiguous_rows || t.strides[0] < row)) return false;
    found.stride = is_empty ? 0 : is_contiguous ? row : t.strides[0];
    const int64_t num_bytes = is_empty ? 0 : ((num_rows - 1) * found.stride + row) * item_bytes;
    if (num_bytes && num_bytes > held_bytes - storage_offset * item_bytes) return false;
    found.start = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset, found.end = found.start + num_bytes;
    found.stride_bytes = found.stride * item_bytes, found.row_bytes = row * item_bytes;
    return true;
  }

  bool disjoint(const Found* found) const {
    for (size_t i = 0; i < expected_.size(); ++i)
      for (size_t j = 0; expected_[i].written && j < expected_.size(); ++j)
        if (i != j && overlap(found[i], found[j]) && !(expected_[j].written && alternate(found[i], found[j])))
          return false;
    return true;
  }

  // All addresses, then the types of those that have a choice, then the strides of those that may have any.
  PyObject* places(const Found* found) const {
    int64_t numbers[3 * kMost];
    Py_ssize_t count = 0;
    for (size_t i = 0; i < expected_.size(); ++i) numbers[count++] = int64_t(found[i].start);
    for (size_t i = 0; i < expected_.size(); ++i)
      if (expected_[i].has_choice()) numbers[count++] = found[i].code;
    for (size_t i = 0; i < expected_.size(); ++i)
      if (!expected_[i].contiguous) numbers[count++] = found[i].stride;
    return numbers_of(numbers, count);
  }

  std::vector<Expected> expected_;
  std::string letters_;  // of the sizes, in the order of their first use
  Torch torch_;
};

// Much of a small call's time would go into pybind11's way of taking arguments.
PyObject* test(PyObject* self, PyObject* const* tensors, Py_ssize_t count) {
  return (*static_cast<const Quick*>(PyCapsule_GetPointer(self, nullptr)))(tensors, count);
}

PyMethodDef kTest{"quick_test", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(test)), METH_FASTCALL,
                  nullptr};

}  // namespace

namespace kernels {

void bind_quick(py::module_& m) {
  m.def("quick_test", [](const std::vector<Quick::Given>& expected) {
    const auto* quick = new Quick(expected);
    const py::capsule self(quick, [](void* it) { delete static_cast<Quick*>(it); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&kTest, self.ptr()));
  });
}

}  // namespace kernels
