"""The folders of these tests are in memory, and their searches are short."""

from tests.in_memory import tmp_path as tmp_path
from tests.short_searches import brief_searches as brief_searches
from tests.short_searches import full_searches as full_searches
from tests.short_searches import short_searches as short_searches
