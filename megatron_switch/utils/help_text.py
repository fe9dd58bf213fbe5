"""How help texts show defaults, the same for our own flags and for Megatron's."""

from argparse import SUPPRESS, Action, HelpFormatter


class ShowingDefaults(HelpFormatter):
    """Adds to each flag its default, where there is one and the text does not contain it already.

    Megatron's texts contain percent signs that argparse would interpret; they are shown literally.
    """

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        has_default = action.default not in (None, SUPPRESS, "", [])
        takes_value = bool(action.option_strings) and action.nargs != 0
        if not text or not has_default or not takes_value or "default:" in text.lower():
            return text
        return f"{text} Default: %(default)s." if text.endswith(".") else f"{text} (%(default)s)"

    def _expand_help(self, action: Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            text = self._get_help_string(action)
            return text.replace("%(default)s", str(action.default)).replace("%%", "%")
