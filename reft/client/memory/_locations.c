/* read_extents(exchange, count_name, tensors, counted, addresses, extents, counts): whether all tensors lie as they did.

Each tensor is compared with its address and its extent: id of its dtype, number of dimensions, shape, strides, as
`extents` has them of one tensor after the other. The attribute `count_name` of each counted object is stored in `counts`. All facts of one tensor
are read before those of the next: they lie close to each other in memory.

A tensor tells its address, dtype, shape and strides by DLPack's C exchange API (`__dlpack_c_exchange_api__`): one call, which
makes no Python object. The two structures below are copied from the standard, dlpack.h 1.3. */
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

/* The extents of the tensors that follow: `next_number` returns the next number, and -1 at the end. */
typedef struct {
    const int64_t *next, *end;
} Extents;

static int64_t next_number(Extents *extents)
{
    return extents->next < extents->end ? *extents->next++ : -1;
}

/* Whether a tuple (a shape, or strides) has the next numbers; 0 also after an error. Takes the reference. */
static int has_next(PyObject *tuple, Extents *extents)
{
    int same = tuple && PyTuple_Check(tuple);
    for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(tuple); i++)
        same = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)) == next_number(extents);
    Py_XDECREF(tuple);
    return same;
}

/* Stores the address of the tensor's dtype, an object that lives as long as torch: what Python's id() returns. */
static int dtype_id(PyObject *tensor, int64_t *id)
{
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype");
    *id = (int64_t)(intptr_t)dtype;
    Py_XDECREF(dtype);
    return dtype != NULL;
}

/* A dtype in DLPack's words and in torch's. Most tensors have the dtype of the tensor before, so one pair is kept. */
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
    int64_t id;
} KnownType;

/* DLPack has no code for some dtypes, such as torch.bits8. */
static int compare_by_calls(PyObject *tensor, uint64_t expected, Extents *extents, int *same)
{
    uint64_t address, dimensions;
    int64_t dtype;
    if (!dtype_id(tensor, &dtype) || !take_integer(PyObject_CallMethod(tensor, "data_ptr", NULL), &address)
        || !take_integer(PyObject_CallMethod(tensor, "dim", NULL), &dimensions))
        return 0;
    *same = address == expected && dtype == next_number(extents) && (int64_t)dimensions == next_number(extents)
        && has_next(PyObject_GetAttrString(tensor, "shape"), extents)
        && has_next(PyObject_CallMethod(tensor, "stride", NULL), extents);
    return !PyErr_Occurred();
}

static int compare(const DLPackExchangeAPI *api, PyObject *tensor, uint64_t expected, Extents *extents, KnownType *type,
                   int *same)
{
    DLTensor found;
    if (api->dltensor_from_py_object_no_sync(tensor, &found) || (found.ndim && !found.strides)) {
        PyErr_Clear();
        return compare_by_calls(tensor, expected, extents, same);
    }
    if (found.dtype.code != type->code || found.dtype.bits != type->bits || found.dtype.lanes != type->lanes) {
        *type = (KnownType){found.dtype.code, found.dtype.bits, found.dtype.lanes, 0};
        if (!dtype_id(tensor, &type->id))
            return 0;
    }
    *same = (uint64_t)(uintptr_t)found.data + found.byte_offset == expected && type->id == next_number(extents)
        && found.ndim == next_number(extents);
    for (int32_t i = 0; *same && i < found.ndim; i++)
        *same = found.shape[i] == next_number(extents);
    for (int32_t i = 0; *same && i < found.ndim; i++)
        *same = found.strides[i] == next_number(extents);
    return 1;
}

static PyObject *read_all(const DLPackExchangeAPI *api, PyObject *count_name, PyObject *tensors, PyObject *counted,
                          const Py_buffer *addresses, const Py_buffer *numbers, const Py_buffer *counts)
{
    int all_same = 1, same = 1;
    KnownType type = {0}; /* no dtype has 0 bits */
    Extents extents = {numbers->buf, (const int64_t *)numbers->buf + numbers->len / (Py_ssize_t)sizeof(int64_t)};
    Py_ssize_t length = PyList_GET_SIZE(tensors), nbytes = length * (Py_ssize_t)sizeof(uint64_t);
    if (PyList_GET_SIZE(counted) != length || addresses->len != nbytes || counts->len != nbytes)
        return PyErr_Format(PyExc_ValueError, "the lists and buffers are not all for %zd tensors", length);
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *tensor = PyList_GetItem(tensors, i), *object = PyList_GetItem(counted, i);
        if (!tensor || !object
            || (all_same && !compare(api, tensor, ((uint64_t *)addresses->buf)[i], &extents, &type, &same))
            || !take_integer(PyObject_GetAttr(object, count_name), (uint64_t *)counts->buf + i))
            return NULL;
        all_same &= same;
    }
    return PyBool_FromLong(all_same && extents.next == extents.end);
}

static PyObject *read_tensors(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *exchange, *count_name, *tensors, *counted, *result = NULL;
    Py_buffer addresses, extents, counts;
    if (!PyArg_ParseTuple(arguments, "OUO!O!y*y*w*:read_extents", &exchange, &count_name, &PyList_Type, &tensors,
                          &PyList_Type, &counted, &addresses, &extents, &counts))
        return NULL;
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    while (api && (api->version.major != DLPACK_MAJOR || !api->dltensor_from_py_object_no_sync))
        api = api->prev_api;
    if (api)
        result = read_all(api, count_name, tensors, counted, &addresses, &extents, &counts);
    else if (!PyErr_Occurred())
        PyErr_Format(PyExc_BufferError, "these tensors do not speak DLPack %d", DLPACK_MAJOR);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&extents);
    PyBuffer_Release(&counts);
    return result;
}

static PyMethodDef functions[] = {{"read_extents", read_tensors, METH_VARARGS, NULL}, {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_locations", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__locations(void)
{
    return PyModule_Create(&definition);
}
