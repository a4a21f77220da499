/* read(exchange, count_name, tensors, counted, addresses, sizes, counts): whether all tensors lie where they did.

Each tensor is compared with its address and its number of elements. The attribute `count_name` of each counted object is
stored in `counts`. All facts of one tensor are read before those of the next: they lie close to each other in memory.

A tensor tells its address and shape by DLPack's C exchange API (`__dlpack_c_exchange_api__`): one call, which makes no
Python object. The two structures below are copied from the standard, dlpack.h 1.3. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#define DLPACK_MAJOR 1

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLPackExchangeAPI {
    struct { uint32_t major, minor; } version;
    struct DLPackExchangeAPI *prev_api;
    void *managed_tensor_allocator, *managed_tensor_from_py_object_no_sync, *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *object, DLTensor *result);
    void *current_work_stream;
} DLPackExchangeAPI;

static int take_integer(PyObject *value, uint64_t *result)
{
    if (!value)
        return 0;
    *result = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *result != (uint64_t)-1 || !PyErr_Occurred();
}

static int find(const DLPackExchangeAPI *api, PyObject *tensor, uint64_t *address, uint64_t *size)
{
    DLTensor found;
    if (api->dltensor_from_py_object_no_sync(tensor, &found)) {
        PyErr_Clear(); /* DLPack has no code for some dtypes, such as torch.bits8 */
        return take_integer(PyObject_CallMethod(tensor, "data_ptr", NULL), address)
            && take_integer(PyObject_CallMethod(tensor, "numel", NULL), size);
    }
    *address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
    *size = 1;
    for (int32_t i = 0; i < found.ndim; i++)
        *size *= (uint64_t)found.shape[i];
    return 1;
}

static PyObject *read_all(const DLPackExchangeAPI *api, PyObject *count_name, PyObject *tensors, PyObject *counted,
                          const Py_buffer *addresses, const Py_buffer *sizes, const Py_buffer *counts)
{
    int same = 1;
    Py_ssize_t length = PyList_GET_SIZE(tensors), nbytes = length * (Py_ssize_t)sizeof(uint64_t);
    if (PyList_GET_SIZE(counted) != length || addresses->len != nbytes || sizes->len != nbytes || counts->len != nbytes)
        return PyErr_Format(PyExc_ValueError, "the lists and buffers are not all for %zd tensors", length);
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *tensor = PyList_GetItem(tensors, i), *object = PyList_GetItem(counted, i);
        uint64_t address, size;
        if (!tensor || !object || !find(api, tensor, &address, &size)
            || !take_integer(PyObject_GetAttr(object, count_name), (uint64_t *)counts->buf + i))
            return NULL;
        same &= address == ((uint64_t *)addresses->buf)[i] && size == ((uint64_t *)sizes->buf)[i];
    }
    return PyBool_FromLong(same);
}

static PyObject *read_tensors(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *exchange, *count_name, *tensors, *counted, *result = NULL;
    Py_buffer addresses, sizes, counts;
    if (!PyArg_ParseTuple(arguments, "OUO!O!y*y*w*:read", &exchange, &count_name, &PyList_Type, &tensors, &PyList_Type,
                          &counted, &addresses, &sizes, &counts))
        return NULL;
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    while (api && (api->version.major != DLPACK_MAJOR || !api->dltensor_from_py_object_no_sync))
        api = api->prev_api;
    if (api)
        result = read_all(api, count_name, tensors, counted, &addresses, &sizes, &counts);
    else if (!PyErr_Occurred())
        PyErr_Format(PyExc_BufferError, "these tensors do not speak DLPack %d", DLPACK_MAJOR);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&counts);
    return result;
}

static PyMethodDef functions[] = {{"read", read_tensors, METH_VARARGS, NULL}, {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_locations", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__locations(void)
{
    return PyModule_Create(&definition);
}
