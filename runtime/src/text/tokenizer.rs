use std::sync::Arc;
use std::time::Duration;

use super::added::{AddedTokens, Stretch};
use super::confined::{Bounds, Stopped, confined};
use super::guard::{Piece, Rendered};
use super::schema::{Facts, Replacement, TokenizerFile};
use super::stream::{ControlText, TextStream, Token};
use super::{Result, TextError};

/// Bytes of stack for encoding.
const STACK: usize = 8 << 20;

/// Bytes of heap for encoding, besides those for each byte of the text.
const MEMORY: usize = 64 << 20;

/// Bytes of heap for each byte of a text. A megabyte without a space was seen to
/// take 134 for each.
const MEMORY_PER_BYTE: usize = 512;

/// Time for encoding, besides that for each byte of the text.
const TIME: Duration = Duration::from_secs(10);

/// Time for each byte of a text. Gemma's tokenizer was seen to take less than a microsecond.
const TIME_PER_BYTE: Duration = Duration::from_micros(20);

/// Text to ids and back, as `tokenizer.json` says.
///
/// A handle: clones share one vocabulary. Control tokens are the file's added tokens marked
/// `special`. The post-processor of the file is not used: no id is added that is not asked for.
///
/// The file is untrusted: one that makes a text grow without measure before it is cut into tokens
/// gives an error, and what was held by then stays allocated until the process ends.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Encodes text without control tokens; a spelled one is plain text to it.
    plain: tokenizers::Tokenizer,
    added: AddedTokens,
    replacements: Vec<Replacement>,
    longest: Option<u64>,
}

impl Tokenizer {
    /// Reads the content of a `tokenizer.json`: a byte-pair model whose decoder is replacements,
    /// byte fallback and fusion.
    ///
    /// # Errors
    /// [`TextError::BadTokenizer`] for bytes that are no such file, and
    /// [`TextError::UnsupportedTokenizer`] naming the first setting that is not supported.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let Facts { replacements, longest } = TokenizerFile::check(bytes)?;
        let bad = |error: tokenizers::Error| TextError::BadTokenizer { reason: error.to_string() };
        let mut plain = tokenizers::Tokenizer::from_bytes(bytes).map_err(bad)?;
        plain.with_truncation(None).map_err(bad)?;
        plain.with_padding(None);
        plain.set_encode_special_tokens(true);
        let added = AddedTokens::new(plain.get_added_vocabulary())?;
        Ok(Self(Arc::new(Inner { plain, added, replacements, longest })))
    }

    /// Number of tokens, control tokens included.
    pub fn vocab_size(&self) -> usize {
        self.0.plain.get_vocab_size(true)
    }

    /// A token as the vocabulary spells it (a space may be `▁`, a byte `<0x0A>`).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.plain.id_to_token(id)
    }

    /// The id of a token, spelled as in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.plain.token_to_id(token)
    }

    /// Whether an id steers the model instead of standing for text.
    pub fn is_control(&self, id: u32) -> bool {
        self.0.added.is_control(id)
    }

    /// Fewest ids that a text of so many bytes can give: no token stands for more bytes than the
    /// longest. 0 where the vocabulary promises nothing.
    pub fn fewest_ids(&self, bytes: usize) -> u64 {
        self.0.longest.map_or(0, |longest| (bytes as u64).div_ceil(longest.max(1)))
    }

    /// Encodes a rendered conversation. Only the template's control tokens become control ids;
    /// none is added, since templates write their own beginning of text.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the vocabulary has no id for some character, or if encoding takes
    /// more memory or time than a text of that length needs.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>> {
        let (inner, rendered) = (Arc::clone(&self.0), rendered.clone());
        within_bounds(rendered.text().len(), move || inner.encode_rendered(&rendered))
    }

    /// Encodes a raw prompt, in which spelled control tokens are control tokens. `bos`, if given,
    /// becomes the first id unless the text already begins with it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_rendered`].
    pub fn encode_raw(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let (inner, text) = (Arc::clone(&self.0), text.to_owned());
        within_bounds(text.len(), move || inner.encode_raw(&text, bos))
    }

    /// The text of ids, all at once; equal to what a [`TextStream`] gives in pieces. Ids outside
    /// the vocabulary are skipped.
    pub fn decode(&self, ids: &[u32], control: ControlText) -> String {
        let mut stream = self.stream(control);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Starts to turn ids into text one by one.
    pub fn stream(&self, control: ControlText) -> TextStream {
        TextStream::new(self.clone(), control)
    }

    pub(super) fn added(&self) -> &AddedTokens {
        &self.0.added
    }

    /// What an id contributes to the text, or `None` outside the vocabulary.
    pub(super) fn token(&self, id: u32) -> Option<Token> {
        let mut text = self.id_to_token(id)?;
        for (from, to) in &self.0.replacements {
            if text.contains(from) {
                text = text.replace(from, to);
            }
        }
        Some(Token::new(text))
    }
}

impl Inner {
    fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in rendered.pieces() {
            match piece {
                Piece::Token(id) => ids.push(*id),
                Piece::Text(range) => {
                    self.encode_plain(&rendered.text()[range.clone()], &mut ids)?
                }
            }
        }
        Ok(ids)
    }

    fn encode_raw(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let stretches = self.added.split(text);
        let mut ids = Vec::new();
        let first = match stretches.first() {
            Some(Stretch::Token { id, .. }) => Some(*id),
            _ => None,
        };
        ids.extend(bos.filter(|_| bos != first));
        for stretch in stretches {
            match stretch {
                Stretch::Token { id, .. } => ids.push(id),
                Stretch::Text(text) => self.encode_plain(text, &mut ids)?,
            }
        }
        Ok(ids)
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let encoding = self
            .plain
            .encode_fast(text, false)
            .map_err(|error| TextError::Encode { reason: error.to_string() })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

/// Encodes a text of some length where a tokenizer can do no harm.
fn within_bounds(
    bytes: usize,
    encode: impl FnOnce() -> Result<Vec<u32>> + Send + 'static,
) -> Result<Vec<u32>> {
    let bounds = Bounds {
        stack: STACK,
        memory: MEMORY.saturating_add(bytes.saturating_mul(MEMORY_PER_BYTE)),
        time: TIME + TIME_PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX),
    };
    let stopped = |stopped: Stopped| match stopped {
        Stopped::NoThread { stack, source } => TextError::NoThread { stack, source },
        Stopped::Bound(_) | Stopped::Panicked => TextError::Encode { reason: stopped.to_string() },
    };
    confined("tokenizer", bounds, encode).map_err(stopped)?
}
