"""C interface of the codec, under the name that other rooms use."""
from kdirect.format.decode cimport ArrowDecoder
