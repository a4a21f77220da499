/* are_same(sources, entries, end): whether the entries of all sources, each followed by `end`, are these very objects.

A source is a dict, whose values count, or any iterable. `sources` and `entries` are lists. The loop over a dict counts
no references: it touches no entry, so the memory of thousands of tensors stays out of the caches. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define AHEAD 8 /* this source's memory is on its way to the caches while the first of them is compared */

static int is_next(PyObject *entries, Py_ssize_t *at, PyObject *object)
{
    return *at < PyList_GET_SIZE(entries) && PyList_GET_ITEM(entries, (*at)++) == object;
}

static PyObject *are_same(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *sources, *entries, *end;
    if (!PyArg_ParseTuple(arguments, "O!O!O:are_same", &PyList_Type, &sources, &PyList_Type, &entries, &end))
        return NULL;
    Py_ssize_t at = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same && i < PyList_GET_SIZE(sources); i++) {
        PyObject *source = PyList_GET_ITEM(sources, i), *entry;
        Py_ssize_t position = 0;
        if (i + AHEAD < PyList_GET_SIZE(sources))
            __builtin_prefetch(PyList_GET_ITEM(sources, i + AHEAD));
        if (PyDict_Check(source)) {
            while (same && PyDict_Next(source, &position, NULL, &entry))
                same = is_next(entries, &at, entry);
        } else {
            source = PySequence_Fast(source, "a source is neither a dict nor iterable");
            if (!source)
                return NULL;
            for (; same && position < PySequence_Fast_GET_SIZE(source); position++)
                same = is_next(entries, &at, PySequence_Fast_GET_ITEM(source, position));
            Py_DECREF(source);
        }
        same = same && is_next(entries, &at, end);
    }
    return PyBool_FromLong(same && at == PyList_GET_SIZE(entries));
}

static PyMethodDef functions[] = {{"are_same", are_same, METH_VARARGS, NULL}, {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_entries", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__entries(void)
{
    return PyModule_Create(&definition);
}
