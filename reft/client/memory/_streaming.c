/* copy(target, source) copies bytes past the caches with SSE2's non-temporal stores. Without SSE2 it uses memcpy. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#define PAST_CACHES 1
#else
#define PAST_CACHES 0
#endif
#define LINE 64

static void copy_bytes(char *to, const char *from, size_t size)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to % LINE; /* after the head only whole lines are written, so no line has to be read */
    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE)
        for (int i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
    _mm_sfence(); /* other cores see these stores before all later ones */
#endif
    memcpy(to, from, size);
}

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer target, source;
    if (!PyArg_ParseTuple(arguments, "w*y*:copy", &target, &source))
        return NULL;
    int fits = target.len == source.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_bytes(target.buf, source.buf, (size_t)source.len);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "%zd bytes can't be copied into %zd", source.len, target.len);
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef functions[] = {{"copy", copy, METH_VARARGS, NULL}, {0}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_streaming", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__streaming(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntMacro(module, PAST_CACHES) < 0)
        Py_CLEAR(module);
    return module;
}
