package page

import (
	"regexp"
	"strings"
)

const fence = "```"

// Block is a code block.
type Block struct {
	// Line is the number of the line on which the block begins.
	Line int
	// Language is the word after the fence.
	Language string
	// Runner is the text of the comment <!-- run: … --> before the block; empty without one.
	Runner string
	// Lines are the lines of the block, without the fences.
	Lines []string
}

// Text returns the lines of the block as one text.
func (b Block) Text() string { return strings.Join(b.Lines, "\n") + "\n" }

var runComment = regexp.MustCompile(`^<!-- run: (.*) -->$`)

// Blocks returns the code blocks of the page, or those of one language.
func (p Page) Blocks(language string) (blocks []Block) {
	runner, open := "", false
	for i, line := range p.lines {
		indent := strings.TrimSpace(line)
		switch {
		case open && indent == fence:
			open, runner = false, ""
		case open:
			b := &blocks[len(blocks)-1]
			b.Lines = append(b.Lines, line)
		case strings.HasPrefix(indent, fence):
			open = true
			blocks = append(blocks, Block{Line: i + 1, Language: strings.TrimPrefix(indent, fence), Runner: runner})
		case runComment.MatchString(indent):
			runner = runComment.FindStringSubmatch(indent)[1]
		case indent != "":
			runner = "" // the comment belongs to the block right after it
		}
	}
	if language == "" {
		return blocks
	}
	var ofLanguage []Block
	for _, b := range blocks {
		if b.Language == language {
			ofLanguage = append(ofLanguage, b)
		}
	}
	return ofLanguage
}

// Command is one command of a console block, with the output beneath it.
type Command struct {
	Text   string
	Output []string
}

// Commands returns the commands of a console block: the lines that begin with a prompt, "$ " or "# ". A line that ends
// with a backslash goes on in the next line. All other lines are output, and a line before the first prompt is returned
// in stray.
func (b Block) Commands() (commands []Command, stray []string) {
	continued := false
	for _, line := range b.Lines {
		line = strings.TrimLeft(line, " \t")
		text, prompt := strings.CutPrefix(line, "$ ")
		if !prompt {
			text, prompt = strings.CutPrefix(line, "# ")
		}
		last := len(commands) - 1
		switch {
		case continued:
			commands[last].Text += "\n" + line
			continued = strings.HasSuffix(line, `\`)
		case prompt:
			commands = append(commands, Command{Text: text})
			continued = strings.HasSuffix(text, `\`)
		case last < 0:
			stray = append(stray, line)
		default:
			commands[last].Output = append(commands[last].Output, line)
		}
	}
	return commands, stray
}
