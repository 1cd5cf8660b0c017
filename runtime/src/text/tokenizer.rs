use std::sync::Arc;

use super::added::{AddedTokens, Stretch};
use super::guard::{Piece, Rendered};
use super::schema::{Replacement, TokenizerFile};
use super::stream::{ControlText, TextStream, Token};
use super::{Result, TextError};

/// Text to ids and back, as `tokenizer.json` says.
///
/// A handle: clones share one vocabulary. Control tokens are the file's added tokens marked
/// `special`. The post-processor of the file is not used: no id is added that is not asked for.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Encodes text without control tokens; a spelled one is plain text to it.
    plain: tokenizers::Tokenizer,
    added: AddedTokens,
    replacements: Vec<Replacement>,
}

impl Tokenizer {
    /// Reads the content of a `tokenizer.json`: a byte-pair model whose decoder is replacements,
    /// byte fallback and fusion.
    ///
    /// # Errors
    /// [`TextError::BadTokenizer`] for bytes that are no such file, and
    /// [`TextError::UnsupportedTokenizer`] naming the first setting that is not supported.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let replacements = TokenizerFile::check(bytes)?;
        let bad = |error: tokenizers::Error| TextError::BadTokenizer { reason: error.to_string() };
        let mut plain = tokenizers::Tokenizer::from_bytes(bytes).map_err(bad)?;
        plain.with_truncation(None).map_err(bad)?;
        plain.with_padding(None);
        plain.set_encode_special_tokens(true);
        let added = AddedTokens::new(plain.get_added_vocabulary())?;
        Ok(Self(Arc::new(Inner { plain, added, replacements })))
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

    /// Encodes a rendered conversation. Only the template's control tokens become control ids;
    /// none is added, since templates write their own beginning of text.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the vocabulary has no id for some character.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>> {
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

    /// Encodes a raw prompt, in which spelled control tokens are control tokens. `bos`, if given,
    /// becomes the first id unless the text already begins with it.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the vocabulary has no id for some character.
    pub fn encode_raw(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let stretches = self.0.added.split(text);
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

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let encoding = self
            .0
            .plain
            .encode_fast(text, false)
            .map_err(|error| TextError::Encode { reason: error.to_string() })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}
