"""What a space holds is tested here; orders need not be the best."""

from tests.short_searches import short_searches as short_searches
